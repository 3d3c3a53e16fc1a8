//! Tokens that are added to a tokenizer.json.

use super::error::DataError;
use super::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// A token that a tokenizer gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its text.
    pub text: String,
    /// Whether answers are shown without it, as without the tokens of a chat template.
    pub special: bool,
    /// Its entry in the tokenizer.json of an adapter.
    pub entry: Option<Value>,
}

/// `tokens` with the ids above the highest one, without those that the tokenizer has.
pub fn numbered(tokenizer: &Tokenizer, tokens: &[NewToken]) -> Vec<(u32, NewToken)> {
    let new = tokens.iter().filter(|token| tokenizer.token_to_id(&token.text).is_none());
    (tokenizer.vocab_size() as u32..).zip(new.cloned()).collect()
}

/// tokenizer.json with these tokens in addition.
pub fn added(tokenizer_json: &str, tokens: &[(u32, NewToken)]) -> Result<String, DataError> {
    let mut json = parsed(tokenizer_json)?;
    let mut list = json["added_tokens"].as_array_mut().map(std::mem::take).unwrap_or_default();
    for (id, token) in tokens {
        // A row without a token may have a text in the vocabulary.
        if let Some(vocabulary) = json["model"]["vocab"].as_object_mut()
            && let Some(place) = vocabulary.iter().find(|(_, own)| **own == *id).map(|(text, _)| text.clone())
        {
            vocabulary.shift_remove(&place);
            vocabulary.insert(token.text.clone(), json!(id));
        }
        list.push(token.entry.clone().unwrap_or_else(|| {
            json!({
                "id": id, "content": token.text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": token.special,
            })
        }));
    }
    json["added_tokens"] = list.into();
    let json = json.to_string();
    // The library numbers added tokens by their order, whatever their entries say.
    let read = Tokenizer::new(&json, None, None, None)?;
    match tokens.iter().find(|(id, token)| read.token_to_id(&token.text) != Some(*id)) {
        None => Ok(json),
        Some((id, NewToken { text, .. })) => Err(DataError::Tokenizer(format!(
            "token {text:?} cannot be added as {id}: the ids below it are not all in use"
        ))),
    }
}

/// The tokens that a tokenizer.json names as added, with their ids.
pub fn of(tokenizer_json: &str) -> Result<Vec<(u32, NewToken)>, DataError> {
    let json = parsed(tokenizer_json)?;
    let each = json["added_tokens"].as_array().into_iter().flatten();
    let token = |entry: &Value| {
        let id = u32::try_from(entry["id"].as_u64()?).ok()?;
        let text = entry["content"].as_str()?.to_owned();
        Some((id, NewToken { text, special: entry["special"] == true, entry: Some(entry.clone()) }))
    };
    Ok(each.filter_map(token).collect())
}

fn parsed(tokenizer_json: &str) -> Result<Value, DataError> {
    serde_json::from_str(tokenizer_json)
        .map_err(|e| DataError::Tokenizer(format!("tokenizer.json cannot be read: {e}")))
}
