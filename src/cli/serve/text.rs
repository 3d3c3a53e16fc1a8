//! The text of an answer while its tokens come. Text that may be the beginning of a stop string is held back.

use crate::cli::speaker::Stream;
use crate::data::tokenizer::{Skip, Tokenizer};
use std::sync::Arc;

/// A text that grows, up to a stop string.
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    stream: Stream,
    stops: Arc<[String]>,
    held: String,
    /// Whether a stop string was found.
    pub ended: bool,
}

impl Text {
    /// A text that ends before the first of `stops`.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Arc<[String]>) -> Self {
        Text { tokenizer, stream: Stream::default(), stops, held: String::new(), ended: false }
    }

    /// Returns the text that is certain after a token.
    pub fn push(&mut self, id: u32) -> String {
        let tokenizer = &self.tokenizer;
        let piece =
            self.stream.push(id, &|ids: &[u32]| tokenizer.decode(ids, Skip::Special).unwrap_or_default());
        self.add(&piece);
        let keep = (0..self.held.len()).find(|&at| {
            let tail = self.held.get(at..);
            tail.is_some_and(|tail| self.stops.iter().any(|stop| stop.starts_with(tail)))
        });
        let rest = self.held.split_off(keep.filter(|_| !self.ended).unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    /// Number of characters that are held back.
    pub fn held(&self) -> usize {
        self.held.chars().count()
    }

    /// Returns what was held back, after the last token.
    pub fn rest(&mut self) -> String {
        let tokenizer = &self.tokenizer;
        let piece = self.stream.rest(&|ids: &[u32]| tokenizer.decode(ids, Skip::Special).unwrap_or_default());
        self.add(&piece);
        std::mem::take(&mut self.held)
    }

    fn add(&mut self, piece: &str) {
        if self.ended {
            return;
        }
        self.held += piece;
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(at);
            self.ended = true;
        }
    }
}

/// The text of a token inside a text. Some decoders drop a space at the beginning, so the token is decoded twice in a row.
pub fn within(id: u32, decode: &impl Fn(&[u32]) -> String) -> String {
    let (once, twice) = (decode(&[id]), decode(&[id, id]));
    twice.strip_prefix(once.as_str()).map_or(once.clone(), str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_keeps_the_space_that_a_decoder_drops_first() {
        let words = [" the", "the", "\u{fffd}", ""];
        let decode = |ids: &[u32]| {
            let text: String = ids.iter().map(|&id| words[id as usize]).collect();
            text.strip_prefix(' ').map(str::to_string).unwrap_or(text)
        };
        assert_eq!([0, 1, 2, 3].map(|id| within(id, &decode)), words);
    }
    use crate::run::base_model;

    #[test]
    fn stop_strings_end_a_text_wherever_tokens_divide_it() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model");
        let tokenizer = Arc::new(base_model::open(model).unwrap().tokenizer(None).unwrap());
        let whole = "git commit --amend -m one";
        let ids = tokenizer.encode(whole, crate::data::tokenizer::Special::Omit).unwrap();
        assert!(ids.len() > 3);
        for (stops, expected) in [
            (vec!["nothing"], whole),
            (vec!["it --am"], "git comm"),
            (vec!["-m", "--amend"], "git commit "),
            (vec!["one more"], whole),
            (vec!["e"], "git commit --am"),
        ] {
            let stops: Arc<[String]> = stops.into_iter().map(String::from).collect();
            let mut text = Text::new(tokenizer.clone(), stops.clone());
            let mut pieces: Vec<String> = ids.iter().map(|&id| text.push(id)).collect();
            pieces.push(text.rest());
            assert_eq!((pieces.concat().as_str(), text.ended), (expected, expected != whole), "{stops:?}");
        }
    }
}
