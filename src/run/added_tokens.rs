//! Tokens that a run adds: the tokenizer gets them, and the base gets rows for them.

use super::base_model::BaseModel;
use crate::config::refusal::{self, Refusal, in_file};
use crate::data::new_tokens::{self, NewToken};
use crate::data::tokenizer::Tokenizer;
use crate::families::wrapped;
use crate::format::peft;
use crate::model::enlarged::enlarge;
use std::path::Path;

/// The tokenizer beside an adapter.
const TOKENIZER: &str = "tokenizer.json";

impl BaseModel {
    /// Adds those of `tokens` that the tokenizer lacks.
    pub fn add_tokens(&mut self, tokens: &[NewToken]) -> Result<(), Refusal> {
        if tokens.is_empty() {
            return Ok(());
        }
        let json = &self.files.tokenizer.tokenizer_json;
        let own = Tokenizer::new(json, None, None, None).map_err(|e| in_file(&self.path, e.into()))?;
        self.add(new_tokens::numbered(&own, tokens))
    }

    /// Adds the tokens that an adapter has trained rows of, and that this tokenizer lacks: they were added for its training.
    pub fn add_tokens_of(&mut self, adapter: Option<&Path>) -> Result<(), Refusal> {
        let Some(dir) = adapter else { return Ok(()) };
        let (file, own) = (dir.join(TOKENIZER), &self.files.tokenizer.tokenizer_json);
        if !file.exists() || !dir.join(peft::CONFIG).exists() {
            return Ok(());
        }
        let its = std::fs::read_to_string(&file).map_err(refusal::at(&file))?;
        if its == *own {
            return Ok(());
        }
        let rows = peft::config(dir)?.token_rows;
        let wrong = |path: &Path, e: crate::data::error::DataError| in_file(path, e.into());
        let mut new = new_tokens::of(&its).map_err(|e| wrong(&file, e))?;
        new.retain(|(id, _)| rows.iter().any(|(_, ids)| ids.contains(id)));
        let own = Tokenizer::new(own, None, None, None).map_err(|e| wrong(&self.path, e))?;
        new.retain(|(id, token)| own.token_to_id(&token.text) != Some(*id));
        for (id, NewToken { text, .. }) in &new {
            let taken = own.token_to_id(text).map(|other| format!("the base's tokenizer has it as {other}"));
            // A GGUF file has a text for each row of its embedding, also for rows without a token.
            let other = own.id_to_token(*id).filter(|other| *other != format!("[PAD{id}]"));
            let taken = taken.or_else(|| Some(format!("in the base {id} is {:?}", other?)));
            if let Some(why) = taken {
                let what = format!("{}: token {text:?} is {id}, {why}", file.display());
                return Err(Refusal::configuration(format!(
                    "{what}: name the base of its training (--model)"
                )));
            }
        }
        self.add(new)
    }

    fn add(&mut self, new: Vec<(u32, NewToken)>) -> Result<(), Refusal> {
        let Some(last) = new.iter().map(|(id, _)| *id as usize).max() else { return Ok(()) };
        let here = |e: crate::data::error::DataError| in_file(&self.path, e.into());
        let files = &mut self.files;
        files.tokenizer.tokenizer_json =
            new_tokens::added(&files.tokenizer.tokenizer_json, &new).map_err(here)?;
        if last >= self.config.vocab {
            wrapped::set_vocabulary(&mut files.config, last + 1);
            files.tensors = enlarge(files.tensors.clone(), &mut self.config, last + 1)
                .map_err(|e| Refusal::configuration(format!("{}: {e}", self.path.display())))?;
        }
        self.added.extend(new);
        Ok(())
    }
}
