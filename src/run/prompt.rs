//! A prompt as tokens: as it stands, or as a user's turn of a conversation.

use crate::config::refusal::Refusal;
use crate::data;
use crate::data::template::Ending;
use crate::data::tokenizer::{Special, Tokenizer};
use serde_json::{Value, json};

/// The ids of a prompt, within the bounds of a row (`data::bounded`).
pub fn prompt_ids<T>(tokenizer: &Tokenizer, prompt: &str, ids: impl FnOnce(&Tokenizer) -> T) -> T {
    data::bounded(&"the prompt", (prompt.len(), usize::MAX), || ids(tokenizer))
}

/// A user's turn (after a system turn, if there is one) up to where the assistant begins.
pub fn chat_ids(tokenizer: &Tokenizer, system: Option<&str>, prompt: &str) -> Result<Vec<u32>, Refusal> {
    let mut turns: Vec<Value> = system.iter().map(|text| turn("system", text)).collect();
    turns.push(turn("user", prompt));
    turns_ids(tokenizer, &turns)
}

/// A turn of a conversation, as chat templates read it.
pub fn turn(role: &str, text: &str) -> Value {
    json!({ "role": role, "content": text })
}

/// A conversation up to where the assistant begins.
pub fn turns_ids(tokenizer: &Tokenizer, turns: &[Value]) -> Result<Vec<u32>, Refusal> {
    let template = tokenizer.template().ok_or_else(|| {
        Refusal::configuration(
            "the model has no chat template: leave --chat out, or give --chat-template FILE|chatml",
        )
    })?;
    let text = template.render(&Value::from(turns), None, Ending::GenerationPrompt)?;
    Ok(tokenizer.encode(&text, Special::Omit)?)
}
