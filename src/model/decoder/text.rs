//! Texts that grow: the keys and values of their tokens, or the last ones of a convolution, stay on the device between calls of [`Stage::extend_all`]. Products are
//! computed for the rows of all texts together, attention for each text alone.
//!
//! [`Stage::extend_all`]: crate::model::stage::Stage::extend_all

use super::Decoder;
use crate::backend::{Backend, Fault, Fused, TokenRows, view};
use crate::model::block::Cache;
use crate::model::head::Below;
use crate::model::linear::Batch;
use crate::model::stage::{Output, Session};

/// Least cache capacity in tokens beyond the needed ones. A full cache grows by a quarter: a text is copied a few times,
/// and little of its memory stays unused.
const ROOM: usize = 256;

/// Keys and values of a text.
pub(super) struct Text<M> {
    /// One for each layer of the stage.
    caches: Vec<Cache<M>>,
    /// Number of tokens.
    len: usize,
    /// Most tokens.
    limit: usize,
    /// Tokens for which the caches have room.
    capacity: usize,
}

impl<M> Text<M> {
    /// Frees the caches.
    pub fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        let memory = self.caches.into_iter().flat_map(|cache| cache.parts);
        memory.for_each(|m| backend.recycle(m));
    }
}

impl<B: Fused> Decoder<B> {
    /// Returns the stage's output for the ids of each text, which follow the tokens of its session.
    pub(super) fn next_output(
        &mut self,
        asked: &[(Session, &[u32])],
        input: Option<&[f32]>,
    ) -> Result<Output, Fault> {
        if self.span.first {
            asked.iter().try_for_each(|(_, ids)| self.check_ids(ids))?;
        }
        let none = || Text { caches: Vec::new(), len: 0, limit: 0, capacity: 0 };
        let taken = asked.iter().map(|(session, _)| self.sessions.remove(session).unwrap_or_else(none));
        let mut texts: Vec<Text<B::Memory>> = taken.collect();
        let ids: Vec<&[u32]> = asked.iter().map(|(_, ids)| *ids).collect();
        let made = self.extend_texts(&mut texts, &ids, input);
        for ((session, _), text) in asked.iter().zip(texts) {
            // A session that was named twice.
            let before = self.sessions.insert(*session, text);
            before.into_iter().for_each(|text| text.recycle(&mut self.backend));
        }
        made
    }

    fn extend_texts(
        &mut self,
        texts: &mut [Text<B::Memory>],
        ids: &[&[u32]],
        input: Option<&[f32]>,
    ) -> Result<Output, Fault> {
        let c = self.config.hidden;
        let mut bounds = vec![0];
        for (text, ids) in texts.iter_mut().zip(ids) {
            self.admit(text, ids.len())?;
            bounds.push(bounds[bounds.len() - 1] + ids.len() as u32);
        }
        let all = ids.concat();
        let t = all.len();
        let short = self.rotations.short();
        let tokens = self.backend.tokens(TokenRows { ids: &all, bounds: &bounds, past: 0, short });
        let own = texts.iter().zip(ids).map(|(text, ids)| {
            let bounds = [0, ids.len() as u32];
            self.backend.tokens(TokenRows { ids, bounds: &bounds, past: text.len as u32, short })
        });
        let own: Vec<B::Tokens> = own.collect();
        let mut x = self.enter(&tokens, &all, input)?;
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: t, tokens: &tokens, params, rotations, dropout: None };
        for i in 0..self.shelf.len() {
            let block = match self.shelf.block(&mut self.backend, i) {
                Ok(block) => block,
                Err(fault) => {
                    self.backend.recycle(x);
                    return Err(fault);
                }
            };
            let caches = texts.iter_mut().zip(ids).zip(&own);
            let grow = caches.map(|((text, ids), tokens)| (&mut text.caches[i], ids.len(), tokens));
            x = block.decode(&mut self.backend, x, &mut grow.collect::<Vec<_>>(), &batch)?;
        }
        texts.iter_mut().zip(ids).for_each(|(text, ids)| text.len += ids.len());
        let output = match &self.head {
            Some(head) => {
                let below = Below {
                    hidden: view(&x, t, c),
                    params: &self.params,
                    embedding: self.embedding.as_ref(),
                    dropout: None,
                };
                let last: Vec<u32> = bounds[1..].iter().map(|end| end - 1).collect();
                head.logits(&mut self.backend, below, &last).map(Output::Logits)
            }
            None => {
                let mut values = vec![0.0; t * c];
                self.backend.read(view(&x, t, c), &mut values).map(|()| Output::Hidden(values))
            }
        };
        self.backend.recycle(x);
        output
    }

    /// Makes room for `t` more tokens, or refuses them.
    fn admit(&mut self, text: &mut Text<B::Memory>, t: usize) -> Result<(), Fault> {
        if text.len == 0 {
            text.limit = self.config.longest_text(t);
        }
        let limit = text.limit;
        if t == 0 || text.len + t > limit {
            return Err(self.fault(format!("{t} tokens after {} of at most {limit}", text.len)));
        }
        self.make_room(text, t);
        Ok(())
    }

    /// Makes the caches large enough for `more` tokens.
    fn make_room(&mut self, text: &mut Text<B::Memory>, more: usize) {
        let needed = text.len + more;
        if needed <= text.capacity {
            return;
        }
        let limit = text.limit;
        let first = text.capacity == 0;
        text.capacity = (needed + ROOM.max(text.capacity / 4)).min(limit);
        self.rotations.reach(&mut self.backend, text.capacity);
        let (backend, config, layers) = (&mut self.backend, &self.config, self.span.layers.clone());
        if first {
            text.caches = layers.map(|layer| Cache::new(backend, config, layer, text.capacity)).collect();
        } else {
            let caches = text.caches.iter_mut().zip(layers);
            caches.for_each(|(cache, layer)| cache.grow(backend, config, layer, text.capacity));
        }
    }
}
