//! Texts that grow: the keys and values of their tokens stay on the device between calls of [`Stage::extend`].
//!
//! [`Stage::extend`]: crate::model::stage::Stage::extend

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
    /// Tokens for which the caches have room.
    capacity: usize,
}

impl<M> Text<M> {
    /// Frees the caches.
    pub fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        let memory = self.caches.into_iter().flat_map(|cache| [cache.k, cache.v]);
        memory.for_each(|m| backend.recycle(m));
    }
}

impl<B: Fused> Decoder<B> {
    /// Returns the stage's output for `ids`, which follow the tokens of the session.
    pub(super) fn next_output(
        &mut self,
        session: Session,
        ids: &[u32],
        input: Option<&[f32]>,
    ) -> Result<Output, Fault> {
        if self.span.first {
            self.check_ids(ids)?;
        }
        let none = Text { caches: Vec::new(), len: 0, capacity: 0 };
        let mut text = self.sessions.remove(&session).unwrap_or(none);
        let made = self.extend_text(&mut text, ids, input);
        self.sessions.insert(session, text);
        made
    }

    fn extend_text(
        &mut self,
        text: &mut Text<B::Memory>,
        ids: &[u32],
        input: Option<&[f32]>,
    ) -> Result<Output, Fault> {
        let (t, c, limit) = (ids.len(), self.config.hidden, self.config.max_positions);
        if t == 0 || text.len + t > limit {
            return Err(self.fault(format!("{t} tokens after {} of at most {limit}", text.len)));
        }
        self.make_room(text, t);
        let tokens = self.backend.tokens(TokenRows { ids, bounds: &[0, t as u32], past: text.len as u32 });
        let mut x = self.enter(&tokens, t, input)?;
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: t, tokens: &tokens, params, rotations, dropout: None };
        for (i, cache) in text.caches.iter_mut().enumerate() {
            match self.shelf.block(&mut self.backend, i) {
                Ok(block) => x = block.decode(&mut self.backend, x, cache, &batch),
                Err(fault) => {
                    self.backend.recycle(x);
                    return Err(fault);
                }
            }
        }
        text.len += t;
        let output = match &self.head {
            Some(head) => {
                let below = Below {
                    hidden: view(&x, t, c),
                    params: &self.params,
                    embedding: self.embedding.as_ref(),
                };
                head.logits(&mut self.backend, below, &[t as u32 - 1]).map(Output::Logits)
            }
            None => {
                let mut values = vec![0.0; t * c];
                self.backend.read(view(&x, t, c), &mut values).map(|()| Output::Hidden(values))
            }
        };
        self.backend.recycle(x);
        output
    }

    /// Makes the caches large enough for `more` tokens.
    fn make_room(&mut self, text: &mut Text<B::Memory>, more: usize) {
        let needed = text.len + more;
        if needed <= text.capacity {
            return;
        }
        let limit = self.config.max_positions;
        let first = text.capacity == 0;
        text.capacity = (needed + ROOM.max(text.capacity / 4)).min(limit);
        self.rotations.reach(&mut self.backend, text.capacity);
        let width = self.config.heads.kv * self.config.heads.size;
        if first {
            let caches = (0..self.shelf.len()).map(|_| Cache::new(&mut self.backend, text.capacity, width));
            text.caches = caches.collect();
        } else {
            text.caches.iter_mut().for_each(|cache| cache.grow(&mut self.backend, text.capacity, width));
        }
    }
}
