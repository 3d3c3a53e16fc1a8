//! Rows of preferences: a prompt with a chosen and a rejected answer, or with one answer and whether it is wanted. The
//! prompt and each answer are texts or lists of messages. Without a prompt, it is the common beginning of both answers,
//! as in TRL's `extract_prompt`.

use super::{Alpaca, Fields, Form, kind, tools, turns};
use serde_json::{Value, json};

/// A prompt and its answers.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// Texts.
    Text {
        /// The prompt.
        prompt: String,
        /// The answers.
        answers: Vec<String>,
    },
    /// Alpaca's fields, whose `output` is empty, and the texts of the answers.
    Alpaca(Alpaca, Vec<String>),
    /// Messages.
    Turns {
        /// Those of the prompt.
        prompt: Vec<Value>,
        /// Those of each answer.
        answers: Vec<Vec<Value>>,
        /// Tool descriptions, if any.
        tools: Option<Value>,
    },
}

/// Two answers, of which the first one is preferred.
pub(super) fn pair(fields: &Fields<'_>) -> Result<Form, String> {
    if !fields.has(&["chosen", "rejected"]) {
        return Err(format!(
            "no pair of answers: it has the fields [{}]; needed are chosen and rejected, and prompt, messages, \
             conversations or instruction unless both begin with it; --data-fields FIELD=COLUMN renames",
            fields.names()
        ));
    }
    Ok(Form::Answers { said: said(fields, &["chosen", "rejected"])?, wanted: None })
}

/// An answer that is wanted or not.
pub(super) fn single(fields: &Fields<'_>) -> Result<Form, String> {
    let turns =
        ["messages", "conversations"].into_iter().find(|name| fields.get(name).is_some_and(|v| v != ""));
    let turns = turns.filter(|_| !fields.has(&["completion"]));
    if !fields.has(&["label"]) || turns.is_none() && !fields.has(&["prompt", "completion"]) {
        return Err(format!(
            "no answer with a label: it has the fields [{}]; needed are label (true or false), and prompt and completion, \
             or messages or conversations that end with the answer; --data-fields FIELD=COLUMN renames",
            fields.names()
        ));
    }
    let wanted = match fields.get("label") {
        Some(Value::Bool(wanted)) => *wanted,
        Some(Value::Number(n)) if n.as_i64() == Some(1) => true,
        Some(Value::Number(n)) if n.as_i64() == Some(0) => false,
        Some(Value::String(s)) if ["true", "1"].contains(&s.trim().to_lowercase().as_str()) => true,
        Some(Value::String(s)) if ["false", "0"].contains(&s.trim().to_lowercase().as_str()) => false,
        _ => return Err("`label` must be true or false".into()),
    };
    let said = match turns {
        Some(name) => ended(fields, name)?,
        None => said(fields, &["completion"])?,
    };
    Ok(Form::Answers { said, wanted: Some(wanted) })
}

/// The answers of a row to be scored: two, one, or the last message of a conversation.
pub(super) fn any(fields: &Fields<'_>) -> Result<Said, String> {
    let turns =
        ["messages", "conversations"].into_iter().find(|name| fields.get(name).is_some_and(|v| v != ""));
    match turns {
        _ if fields.has(&["chosen", "rejected"]) => said(fields, &["chosen", "rejected"]),
        _ if fields.has(&["completion"]) => said(fields, &["completion"]),
        Some(name) => ended(fields, name),
        None => Err(format!(
            "nothing to score: it has the fields [{}]; known are text, prompt and completion, prompt, chosen and \
             rejected, and messages or conversations that end with an answer; --data-fields FIELD=COLUMN renames",
            fields.names()
        )),
    }
}

/// A conversation whose last message is the answer.
fn ended(fields: &Fields<'_>, name: &str) -> Result<Said, String> {
    let Some(Value::Array(list)) = fields.structured(name)? else {
        return Err(format!("`{name}` must be a list of messages"));
    };
    let mut prompt = list.iter().map(turns::sharegpt).collect::<Result<Vec<_>, _>>()?;
    match prompt.pop() {
        Some(answer) if answer["role"] == "assistant" => conversation(fields, prompt, vec![vec![answer]]),
        _ => Err(format!("`{name}` must end with the assistant's message")),
    }
}

fn said(fields: &Fields<'_>, names: &[&str]) -> Result<Said, String> {
    let answers: Vec<&Value> = names.iter().filter_map(|name| fields.get(name)).collect();
    let is_text = |value: &&Value| value.is_string();
    let (texts, turns) = (answers.iter().all(is_text), !answers.iter().any(is_text));
    if !texts && !turns {
        return Err(format!("{} must both be texts, or both be messages", names.join(" and ")));
    }
    let text = || names.iter().map(|name| fields.text(name)).collect::<Result<Vec<_>, _>>();
    let given = ["messages", "conversations", "prompt"]
        .into_iter()
        .find(|name| fields.get(name).is_some_and(|v| v != ""));
    match (given, given.and_then(|name| fields.get(name))) {
        (Some("prompt"), Some(Value::String(prompt))) if texts => {
            Ok(Said::Text { prompt: prompt.clone(), answers: text()? })
        }
        (Some("prompt"), Some(Value::String(prompt))) => {
            let answers = messages_of(fields, names)?;
            let user = vec![json!({"role": "user", "content": prompt})];
            // Some data sets repeat the prompt in both lists.
            let repeated = common(&answers) > 0 && answers[0][0]["role"] != "assistant";
            let (prompt, answers) = if repeated { implied(answers) } else { (user, answers) };
            conversation(fields, prompt, answers)
        }
        (Some(name), _) => {
            let Some(Value::Array(list)) = fields.structured(name)? else {
                return Err(format!("`{name}` must be a list of messages"));
            };
            let prompt = list.iter().map(turns::sharegpt).collect::<Result<_, _>>()?;
            conversation(fields, prompt, messages_of(fields, names)?)
        }
        (None, _) if fields.has(&["instruction"]) && texts => {
            Ok(Said::Alpaca(super::question(fields)?, text()?))
        }
        (None, _) if texts => {
            let answers = text()?;
            let at = common_text(&answers);
            let prompt = answers.first().map_or(String::new(), |first| first[..at].into());
            Ok(Said::Text { prompt, answers: answers.iter().map(|answer| answer[at..].into()).collect() })
        }
        (None, _) => {
            let (prompt, answers) = implied(messages_of(fields, names)?);
            conversation(fields, prompt, answers)
        }
    }
}

/// Answers as messages: a list, one message, or the text of the assistant.
fn messages_of(fields: &Fields<'_>, names: &[&str]) -> Result<Vec<Vec<Value>>, String> {
    let list = |name: &&str| match fields.get(name) {
        Some(Value::Array(list)) => list.iter().map(turns::sharegpt).collect(),
        Some(one @ Value::Object(_)) => Ok(vec![turns::sharegpt(one)?]),
        Some(Value::String(text)) => Ok(vec![json!({"role": "assistant", "content": text})]),
        other => {
            Err(format!("`{name}` must be a text or messages, it is {}", kind(other.unwrap_or(&Value::Null))))
        }
    };
    names.iter().map(list).collect()
}

fn conversation(
    fields: &Fields<'_>,
    mut prompt: Vec<Value>,
    answers: Vec<Vec<Value>>,
) -> Result<Said, String> {
    let system = fields.optional("system")?;
    if !system.is_empty() && prompt.first().and_then(|m| m.get("role")).is_none_or(|role| role != "system") {
        prompt.insert(0, json!({"role": "system", "content": system}));
    }
    if prompt.is_empty() {
        return Err("chosen and rejected have no common first message: give the row a prompt".into());
    }
    turns::check(Value::Array(prompt.clone()))?;
    answers.iter().try_for_each(|answer| turns::check(Value::Array(answer.clone())).map(drop))?;
    Ok(Said::Turns { prompt, answers, tools: tools(fields)? })
}

/// Number of messages that both lists begin with.
fn common(lists: &[Vec<Value>]) -> usize {
    match lists {
        [one, other] => one.iter().zip(other).take_while(|(a, b)| a == b).count(),
        _ => 0,
    }
}

/// Separates the common beginning. At least one message is left of each list.
fn implied(mut lists: Vec<Vec<Value>>) -> (Vec<Value>, Vec<Vec<Value>>) {
    let shortest = lists.iter().map(Vec::len).min().unwrap_or(0);
    let at = common(&lists).min(shortest.saturating_sub(1));
    let answers = lists.iter_mut().map(|list| list.split_off(at)).collect();
    (lists.into_iter().next().unwrap_or_default(), answers)
}

/// Length of the common beginning of both texts, without a space at its end.
fn common_text(texts: &[String]) -> usize {
    let [one, other] = texts else { return 0 };
    let mut pairs = one.char_indices().zip(other.chars());
    let at = match pairs.find(|((_, a), b)| a != b) {
        Some(((at, _), _)) => at,
        None => {
            // One text begins the other: its last character is left.
            let shorter = if one.len() < other.len() { one } else { other };
            return shorter.char_indices().last().map_or(0, |(at, _)| at);
        }
    };
    if one[..at].ends_with(' ') { at - 1 } else { at }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Options, Task, form};

    fn read(row: Value) -> Result<Form, String> {
        form::of(&row, &Options { task: Task::Unpaired, ..Options::default() })
    }

    #[test]
    fn a_text_prompt_stays_before_answers_that_begin_alike() {
        let of = |role: &str, content: &str| json!({"role": role, "content": content});
        let lists = |first: Value| {
            let answers = ["a", "b"].map(|text| json!([first, of("assistant", text)]));
            let row = json!({"prompt": "q", "chosen": answers[0], "rejected": answers[1]});
            form::of(&row, &Options { task: Task::Pairs, ..Options::default() }).unwrap()
        };
        let expected = |prompt: Value| {
            let row = json!({"prompt": prompt, "chosen": [of("assistant", "a")], "rejected": [of("assistant", "b")]});
            form::of(&row, &Options { task: Task::Pairs, ..Options::default() }).unwrap()
        };
        assert_eq!(lists(of("user", "q")), expected(json!([of("user", "q")])), "repeated in both lists");
        let called = lists(of("assistant", "let me see"));
        assert!(format!("{called:?}").contains("\"q\""), "{called:?}");
    }

    #[test]
    fn labelled_conversations_are_prompts_with_answers() {
        let (user, answer) =
            (json!({"role": "user", "content": "q"}), json!({"role": "assistant", "content": "a"}));
        let expected = read(json!({"prompt": [user], "completion": [answer], "label": true})).unwrap();
        assert!(matches!(&expected, Form::Answers { wanted: Some(true), .. }));
        let turns = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]);
        for row in [
            json!({"messages": [user, answer], "label": true}),
            json!({"conversations": turns, "label": "true"}),
        ] {
            assert_eq!(read(row.clone()).unwrap(), expected, "{row}");
        }
        let error = read(json!({"messages": [user], "label": true})).unwrap_err();
        assert!(error.contains("`messages` must end with the assistant's message"), "{error}");
        assert!(read(json!({"messages": [user, answer]})).unwrap_err().contains("needed are label"));
        assert!(read(json!({"prompt": "q", "label": true})).unwrap_err().contains("needed are label"));
    }
}
