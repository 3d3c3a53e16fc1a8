//! Tokens that a run adds: the tokenizer gets them, and the base gets rows for them.

use super::base_model::BaseModel;
use crate::config::refusal::{self, Refusal, in_file};
use crate::data::error::DataError;
use crate::data::new_tokens::{self, NewToken};
use crate::data::tokenizer::Tokenizer;
use crate::families::wrapped;
use crate::format::{gguf, peft};
use crate::model::enlarged::enlarge;
use crate::support::stderr::say;
use std::path::Path;

/// The tokenizer beside an adapter.
const TOKENIZER: &str = "tokenizer.json";

impl BaseModel {
    /// Adds those of `tokens` that the tokenizer lacks.
    pub fn add_tokens(&mut self, tokens: &[NewToken]) -> Result<(), Refusal> {
        if tokens.is_empty() {
            return Ok(());
        }
        let own = self.own_tokenizer()?;
        let ordinary = |text: &str| own.token_to_id(text).is_some() && !own.is_special(text);
        for NewToken { text, .. } in tokens.iter().filter(|token| token.special && ordinary(&token.text)) {
            let stays = "the tokenizer has it as an ordinary token, and it stays one";
            say!("warning: --add-special-tokens {text:?}: {stays}; its row is trained");
        }
        self.add(new_tokens::numbered(&own, tokens))
    }

    /// Adds the tokens that an adapter has trained rows of, and that this tokenizer lacks: they were added for its
    /// training. Tokens below them are added too, because ids depend on the order.
    pub fn add_tokens_of(&mut self, adapter: Option<&Path>) -> Result<(), Refusal> {
        let Some(dir) = adapter else { return Ok(()) };
        let file = dir.join(TOKENIZER);
        if !file.exists() || !dir.join(peft::CONFIG).exists() {
            return Ok(());
        }
        let its = std::fs::read_to_string(&file).map_err(refusal::at(&file))?;
        let rows = peft::config(dir)?.token_rows;
        if its == self.files.tokenizer.tokenizer_json || rows.is_empty() {
            return Ok(());
        }
        let own = self.own_tokenizer()?;
        let mut new = new_tokens::of(&its).map_err(|e| in_file(&file, e.into()))?;
        new.retain(|(id, token)| own.token_to_id(&token.text) != Some(*id));
        let trained = |id: u32| rows.iter().any(|(_, ids)| ids.contains(&id));
        let last = new.iter().map(|(id, _)| *id).filter(|id| trained(*id)).max();
        let first = own.vocab_size() as u32;
        new.retain(|(id, _)| trained(*id) || *id >= first && Some(*id) <= last);
        new.sort_by_key(|(id, _)| *id);
        for (id, NewToken { text, .. }) in &new {
            let taken = own.token_to_id(text).map(|other| format!("the base's tokenizer has it as {other}"));
            // A GGUF file has a text for each row of its embedding, also for rows without a token.
            let other = own.id_to_token(*id).filter(|other| *other != gguf::unused(*id as usize));
            let taken = taken.or_else(|| Some(format!("in the base {id} is {:?}", other?)));
            if let Some(why) = taken {
                let what = format!("{}: token {text:?} is {id}, {why}", file.display());
                let way =
                    "name the base of its training (--model), and open adapters with other tokens alone";
                return Err(Refusal::configuration(format!("{what}: {way}")));
            }
        }
        self.add(new)
    }

    fn own_tokenizer(&self) -> Result<Tokenizer, Refusal> {
        let json = &self.files.tokenizer.tokenizer_json;
        Tokenizer::new(json, None, None, None).map_err(|e| in_file(&self.path, e.into()))
    }

    fn add(&mut self, new: Vec<(u32, NewToken)>) -> Result<(), Refusal> {
        let Some(last) = new.iter().map(|(id, _)| *id as usize).max() else { return Ok(()) };
        let here = |e: DataError| in_file(&self.path, e.into());
        let files = &mut self.files;
        let json = new_tokens::added(&files.tokenizer.tokenizer_json, &new).map_err(here)?;
        files.tokenizer.tokenizer_json = json;
        if last >= self.config.vocab {
            wrapped::set_vocabulary(&mut files.config, last + 1);
            files.tensors = enlarge(files.tensors.clone(), &mut self.config, last + 1)
                .map_err(|e| Refusal::configuration(format!("{}: {e}", self.path.display())))?;
        }
        self.added.extend(new);
        Ok(())
    }
}
