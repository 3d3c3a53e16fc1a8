//! Tokens that are added to a tokenizer.json, as transformers' `add_tokens` does.

use super::error::DataError;
use super::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// A token that a tokenizer gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its text, which is always one token from then on.
    pub text: String,
    /// Whether answers are shown without it, as without the tokens of a chat template.
    pub special: bool,
}

/// `tokens` with the next free ids, without those that the tokenizer has.
pub fn numbered(tokenizer: &Tokenizer, tokens: &[NewToken]) -> Vec<(u32, NewToken)> {
    let new = tokens.iter().filter(|token| tokenizer.token_to_id(&token.text).is_none());
    (tokenizer.vocab_size() as u32..).zip(new.cloned()).collect()
}

/// tokenizer.json with these tokens in addition.
pub fn added(tokenizer_json: &str, tokens: &[(u32, NewToken)]) -> Result<String, DataError> {
    let mut json = parsed(tokenizer_json)?;
    if !json["added_tokens"].is_array() {
        json["added_tokens"] = json!([]);
    }
    let entries = tokens.iter().map(|(id, token)| {
        json!({
            "id": id, "content": token.text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": token.special,
        })
    });
    json["added_tokens"].as_array_mut().into_iter().for_each(|list| list.extend(entries.clone()));
    Ok(json.to_string())
}

/// The tokens that a tokenizer.json names as added, with their ids.
pub fn of(tokenizer_json: &str) -> Result<Vec<(u32, NewToken)>, DataError> {
    let json = parsed(tokenizer_json)?;
    let each = json["added_tokens"].as_array().into_iter().flatten();
    let token = |entry: &Value| {
        let id = u32::try_from(entry["id"].as_u64()?).ok()?;
        let text = entry["content"].as_str()?.to_owned();
        Some((id, NewToken { text, special: entry["special"] == true }))
    };
    Ok(each.filter_map(token).collect())
}

fn parsed(tokenizer_json: &str) -> Result<Value, DataError> {
    serde_json::from_str(tokenizer_json)
        .map_err(|e| DataError::Tokenizer(format!("tokenizer.json cannot be read: {e}")))
}
