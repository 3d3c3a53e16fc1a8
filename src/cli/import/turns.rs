//! Conversations of other trainers. A list of {role, content} is our field `messages`, a list of {from, value} is
//! `conversations`; other names of these fields cannot be converted and are reported.

use super::{Import, is_empty, scalar};
use serde_json::{Map, Value};

/// Names of a turn's role and content, and our field for them.
const FORMS: &[(&str, &str, &str)] = &[("role", "content", "messages"), ("from", "value", "conversations")];

/// Names of speakers by LLaMA-Factory's tags, and the values that are accepted.
const SPEAKERS: &[(&str, &[&str])] = &[
    ("user_tag", &["human", "user"]),
    ("assistant_tag", &["gpt", "assistant", "chatgpt", "bot", "model"]),
    ("observation_tag", &["observation", "tool", "function_response", "tool_response"]),
    ("function_tag", &["function_call", "tool_call"]),
    ("system_tag", &["system"]),
];

const SPEAKER: &str =
    "speakers are user, assistant, system and tool, or human and gpt: rename them in the rows";
const TURN: &str = "a turn is {role, content} or {from, value}: rename them in the rows";

/// The field of one of Axolotl's data sets, in which `message_property_mappings` may rename the parts of turns.
pub fn axolotl(import: &mut Import, key: &str, set: &Map<String, Value>) -> &'static str {
    let named = |part: &str| {
        let mapped = set.get("message_property_mappings").and_then(|m| m.get(part));
        mapped.or_else(|| set.get(&format!("message_field_{part}"))).filter(|v| !is_empty(v)).map(scalar)
    };
    let kind = set.get("type").map(scalar).unwrap_or_default();
    let usual = if kind.starts_with("sharegpt") { FORMS[1] } else { FORMS[0] };
    let form = form(named("role"), named("content"), usual);
    let others = set.get("message_property_mappings").and_then(Value::as_object);
    for (part, name) in others.into_iter().flatten() {
        if !matches!(part.as_str(), "role" | "content") && scalar(name) != *part {
            import.lose(&format!("{key}: message_property_mappings: {part}"), name, TURN);
        }
    }
    form.unwrap_or_else(|| {
        let value = set.get("message_property_mappings").cloned().unwrap_or_default();
        import.lose(&format!("{key}: message_property_mappings"), &value, TURN);
        usual.2
    })
}

/// The field of an entry of `dataset_info.json`; unsupported tags are reported as lost.
pub fn llama_factory(import: &mut Import, name: &str, entry: &Value) -> &'static str {
    let tag = |part: &str| entry.get("tags").and_then(|t| t.get(part)).filter(|v| !is_empty(v)).map(scalar);
    let openai = entry.get("formatting").is_some_and(|f| f == "openai");
    let usual = if openai { FORMS[0] } else { FORMS[1] };
    for (part, known) in SPEAKERS {
        if let Some(value) = tag(part).filter(|v| !known.contains(&v.as_str())) {
            import.lose(&format!("dataset: {name}: {part}"), &Value::from(value), SPEAKER);
        }
    }
    form(tag("role_tag"), tag("content_tag"), usual).unwrap_or_else(|| {
        let value = entry.get("tags").cloned().unwrap_or_default();
        import.lose(&format!("dataset: {name}: tags"), &value, TURN);
        usual.2
    })
}

/// The field for turns with these names; one of them is enough.
fn form(
    role: Option<String>,
    content: Option<String>,
    usual: (&str, &str, &'static str),
) -> Option<&'static str> {
    let fits = |name: &Option<String>, ours: &str| name.as_ref().is_none_or(|n| n == ours);
    if role.is_none() && content.is_none() {
        return Some(usual.2);
    }
    FORMS.iter().find(|(r, c, _)| fits(&role, r) && fits(&content, c)).map(|(.., field)| *field)
}
