//! A prompt as tokens: unchanged, or as a user's turn of a conversation.

use crate::config::refusal::Refusal;
use crate::data;
use crate::data::template::Ending;
use crate::data::tokenizer::{Special, Tokenizer};
use serde_json::{Value, json};

/// The ids of a prompt, within the limits of a row (`data::bounded`).
pub fn prompt_ids<T>(tokenizer: &Tokenizer, prompt: &str, ids: impl FnOnce(&Tokenizer) -> T) -> T {
    data::bounded(&"the prompt", (prompt.len(), usize::MAX), || ids(tokenizer))
}

/// A user's turn (after an optional system turn) up to the beginning of the assistant's turn.
pub fn chat_ids(tokenizer: &Tokenizer, system: Option<&str>, prompt: &str) -> Result<Vec<u32>, Refusal> {
    let mut turns: Vec<Value> = system.iter().map(|text| turn("system", text)).collect();
    turns.push(turn("user", prompt));
    turns_ids(tokenizer, &turns)
}

/// A turn of a conversation, in the form that chat templates read.
pub fn turn(role: &str, text: &str) -> Value {
    json!({ "role": role, "content": text })
}

/// A conversation up to the beginning of the assistant's turn.
pub fn turns_ids(tokenizer: &Tokenizer, turns: &[Value]) -> Result<Vec<u32>, Refusal> {
    let template = tokenizer.template().ok_or_else(|| {
        Refusal::configuration(
            "the model has no chat template: leave --chat out, or give --chat-template FILE|chatml",
        )
    })?;
    let text = template.render(&Value::from(turns), None, Ending::GenerationPrompt)?;
    Ok(tokenizer.encode(&text, Special::Omit)?)
}

/// The text that the template puts before and after the only user's turn; `None` if the template does not keep the
/// turn's text.
pub fn frame(tokenizer: &Tokenizer) -> Option<(String, String)> {
    const TURN: &str = "\u{F0002}";
    let turns = Value::from(vec![turn("user", TURN)]);
    let text = tokenizer.template()?.render(&turns, None, Ending::GenerationPrompt).ok()?;
    text.split_once(TURN).map(|(before, after)| (before.to_owned(), after.to_owned()))
}
