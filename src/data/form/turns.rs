//! The turns of a conversation: checks of messages, and conversion of ShareGPT turns.

use super::{Chat, kind};
use serde_json::{Value, json};

/// Fields of a message that say whether it is trained on: of this program, Axolotl, and OpenAI.
const MARKS: [&str; 3] = ["train", "training", "weight"];
/// Fields of a ShareGPT turn that a message has too.
const KEPT: [&str; 6] = ["train", "training", "weight", "reasoning_content", "thinking", "reasoning"];

/// Whether a message is marked to be trained on (`train` and `training`: true or false; `weight`: 1 or 0); `None`
/// without a mark.
pub fn mark(message: &Value) -> Result<Option<bool>, String> {
    let mut mark = None;
    for field in MARKS {
        let found = match message.get(field) {
            None | Some(Value::Null) => continue,
            Some(Value::Bool(train)) if field != "weight" => *train,
            Some(Value::Number(n)) if field == "weight" && n.as_f64() == Some(1.0) => true,
            Some(Value::Number(n)) if field == "weight" && n.as_f64() == Some(0.0) => false,
            Some(other) => {
                let known = if field == "weight" { "0 or 1" } else { "true or false" };
                return Err(format!("its `{field}` must be {known}, it is {other}"));
            }
        };
        if mark.is_some_and(|before| before != found) {
            return Err(format!("its `{field}` contradicts another of {}", MARKS.join(", ")));
        }
        mark = Some(found);
    }
    Ok(mark)
}

/// Rejects messages whose marks are invalid.
pub fn check_marks(messages: Value) -> Result<Value, String> {
    for (i, message) in messages.as_array().into_iter().flatten().enumerate() {
        mark(message).map_err(|why| format!("message {}: {why}", i + 1))?;
    }
    Ok(messages)
}

impl Chat {
    /// The list of messages.
    pub fn messages(&self) -> &[Value] {
        self.messages.as_array().map_or(&[], Vec::as_slice)
    }

    /// Whether a message has a mark.
    pub fn is_marked(&self) -> bool {
        self.messages().iter().any(|m| mark(m).is_ok_and(|mark| mark.is_some()))
    }

    /// The reason if the conversation has no assistant turn, otherwise None.
    pub fn unanswered(&self) -> Option<String> {
        let mut roles: Vec<&str> = Vec::new();
        for message in self.messages() {
            let role = message.get("role").and_then(Value::as_str).unwrap_or("none");
            if !roles.contains(&role) {
                roles.push(role);
            }
        }
        let named = roles.join(", ");
        let what = "no message has the role assistant";
        (!roles.contains(&"assistant"))
            .then(|| format!("{what} (the roles are {named}): rename them to user and assistant"))
    }
}

/// Rejects a value that is not a list of messages with roles.
pub fn check(messages: Value) -> Result<Value, String> {
    let list = messages.as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        return Err("a conversation must have at least one message".into());
    }
    for (i, message) in list.iter().enumerate() {
        let at = i + 1;
        if !message.is_object() {
            return Err(format!(
                "message {at} must be an object with role and content, it is {}",
                kind(message)
            ));
        }
        if message.get("role").and_then(Value::as_str).is_none() {
            return Err(format!("message {at} has no role"));
        }
    }
    Ok(messages)
}

/// Converts a ShareGPT turn to a message with the role names of chat templates.
pub fn sharegpt(turn: &Value) -> Result<Value, String> {
    if turn.get("role").is_some() {
        return Ok(turn.clone());
    }
    let from = turn.get("from").and_then(Value::as_str).ok_or("a turn of `conversations` has no `from`")?;
    let value = turn.get("value").ok_or("a turn of `conversations` has no `value`")?;
    let role = match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "bot" | "model" => "assistant",
        "system" => "system",
        "tool" | "observation" | "function_response" | "tool_response" => "tool",
        "function_call" | "tool_call" => return function_call(value),
        other => {
            return Err(format!(
                "unknown speaker `{other}`: known are human, gpt, system, tool, function_call"
            ));
        }
    };
    let mut message = json!({"role": role, "content": value});
    for field in KEPT {
        if let Some(value) = turn.get(field) {
            message[field] = value.clone();
        }
    }
    Ok(message)
}

/// Converts a function call, written as JSON in the turn's text, to an assistant message with `tool_calls`.
fn function_call(value: &Value) -> Result<Value, String> {
    let parsed = match value {
        Value::String(s) => {
            serde_json::from_str(s).map_err(|e| format!("a function_call is not JSON: {e}"))?
        }
        other => other.clone(),
    };
    let calls = if let Value::Array(list) = parsed { list } else { vec![parsed] };
    let calls: Vec<Value> = calls.into_iter().map(|c| json!({"type": "function", "function": c})).collect();
    Ok(json!({"role": "assistant", "content": "", "tool_calls": calls}))
}
