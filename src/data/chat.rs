//! A conversation's text and the byte ranges of it that are supervised.
//!
//! Generation blocks of the template decide where there are any, exactly as they stand. Without them the span
//! of assistant turn i is found by rendering twice: the conversation up to it with the generation prompt (P), and
//! with the turn (F); P must begin F, both must begin the whole, and the span is what F has beyond P.
//! What follows the end-of-turn token in it is cut if it is only white space: ChatML puts a newline there that
//! belongs to no turn, and at inference nobody generates it (axolotl leaves it out too; TRL's Qwen templates, whose
//! generation blocks take it in, can be given with --chat-template).
//! Turns beyond the tokens that are kept are not looked for: each costs a rendering of all that stands before it.
//! Exception: a template may render a turn differently once it is history (Qwen3 drops its thinking). Then the
//! whole has a shorter turn than F; it is accepted if the whole has after P exactly what F ends with, and the
//! message's content is all in there.

use crate::data::error::DataError;
use crate::data::form::Chat;
use crate::data::template::{ChatTemplate, Ending, Rendered};
use crate::data::tokenizer::Tokenizer;
use serde_json::Value;
use std::borrow::Cow;
use std::ops::Range;

/// Renders a whole conversation.
pub fn render(chat: &Chat, tokenizer: &Tokenizer) -> Result<Rendered, DataError> {
    let template = tokenizer.template().ok_or_else(no_template)?;
    template.render_traced(&chat.messages, chat.tools.as_ref(), Ending::Turn).map_err(|e| incomplete(chat, e))
}

fn no_template() -> DataError {
    DataError::Template(
        "this model has none, and the row is a conversation: use --chat-template FILE or chatml".into(),
    )
}

/// Names a message without content beside a template's error, which often follows from it.
fn incomplete(chat: &Chat, error: DataError) -> DataError {
    let messages = chat.messages.as_array().map_or(&[][..], Vec::as_slice);
    let empty = |m: &Value| ["content", "tool_calls"].iter().all(|key| m.get(key).is_none_or(Value::is_null));
    match (error, messages.iter().position(empty)) {
        (DataError::Template(why), Some(i)) => {
            let role = messages[i].get("role").and_then(Value::as_str).unwrap_or("unknown");
            DataError::Template(format!(
                "{why}: message {} (role {role}) has no content: give it a text, or leave the row out",
                i + 1
            ))
        }
        (error, _) => error,
    }
}

/// The supervised byte ranges of `whole`, ascending: all that begin before the byte `kept`.
pub fn supervised(
    chat: &Chat,
    tokenizer: &Tokenizer,
    whole: &Rendered,
    kept: usize,
) -> Result<Vec<Range<usize>>, DataError> {
    let template = tokenizer.template().ok_or_else(no_template)?;
    if let Some(blocks) = &whole.generation {
        let start = match chat.context {
            0 => 0,
            n => prefix(template, chat, n, Ending::GenerationPrompt)?.len(),
        };
        return Ok(blocks.iter().filter(|b| b.start >= start).cloned().collect());
    }
    let messages = chat.messages.as_array().map_or(&[][..], Vec::as_slice);
    let mut supervised = Vec::new();
    for (i, message) in messages.iter().enumerate().skip(chat.context) {
        if message.get("role").and_then(Value::as_str) == Some("assistant") {
            let span = turn(template, chat, i, &whole.text)?;
            if span.start >= kept {
                break;
            }
            supervised.push(cut_after_end(&whole.text, span, tokenizer));
        }
    }
    Ok(supervised)
}

/// The conversation's first n messages as text.
fn prefix(template: &ChatTemplate, chat: &Chat, n: usize, ending: Ending) -> Result<String, DataError> {
    let messages = chat.messages.as_array().map_or(&[][..], Vec::as_slice);
    let head = Value::Array(messages[..n.min(messages.len())].to_vec());
    template.render(&head, chat.tools.as_ref(), ending)
}

/// Where assistant turn i stands in the whole.
fn turn(template: &ChatTemplate, chat: &Chat, i: usize, whole: &str) -> Result<Range<usize>, DataError> {
    let refuse = |what: &str| {
        let at = i + 1;
        DataError::Template(format!(
            "cannot tell where assistant message {at} begins and ends: {what}; \
             use --chat-template FILE with {{% generation %}} blocks, or chatml"
        ))
    };
    let before = prefix(template, chat, i, Ending::GenerationPrompt)
        .map_err(|e| refuse(&format!("rendering the messages before it fails: {e}")))?;
    // the last message's turn ends where the whole does: one rendering less for most rows
    let last = chat.messages.as_array().is_some_and(|m| m.len() == i + 1);
    let with = if last { Cow::from(whole) } else { Cow::from(prefix(template, chat, i + 1, Ending::Turn)?) };
    let Some(answer) = with.strip_prefix(before.as_str()) else {
        return Err(refuse("the text up to it with the generation prompt does not begin the text with it"));
    };
    let Some(rest) = whole.strip_prefix(before.as_str()) else {
        return Err(refuse("the text up to it does not begin the whole conversation"));
    };
    if rest.starts_with(answer) {
        return Ok(before.len()..before.len() + answer.len());
    }
    let message = &chat.messages[i];
    let kept = answer.char_indices().map(|(at, _)| at).find(|&at| rest.starts_with(&answer[at..]));
    match kept {
        Some(at) if holds_content(&answer[at..], message) => {
            Ok(before.len()..before.len() + answer.len() - at)
        }
        _ => Err(refuse("the text with it does not begin the whole conversation")),
    }
}

/// Whether a piece of text holds a message's content; of a message without content, the name of a tool it calls.
fn holds_content(text: &str, message: &Value) -> bool {
    let content = message.get("content").and_then(Value::as_str).unwrap_or("");
    // what stands before </think> in the content is thinking, which templates may drop
    let content = content.rsplit("</think>").next().unwrap_or(content).trim();
    if !content.is_empty() {
        return text.contains(content);
    }
    let call = message.get("tool_calls").and_then(|c| c.get(0));
    let name = call.and_then(|c| c.get("function").unwrap_or(c).get("name")).and_then(Value::as_str);
    name.is_some_and(|n| text.contains(n))
}

/// Leaves out white space after the end-of-turn token.
fn cut_after_end(whole: &str, span: Range<usize>, tokenizer: &Tokenizer) -> Range<usize> {
    let turn = &whole[span.clone()];
    let trimmed = turn.trim_end();
    if tokenizer.ends_with_special(trimmed) { span.start..span.start + trimmed.len() } else { span }
}

/// One bit a token: it overlaps a supervised range. Tokens of no text are never supervised.
pub fn mask(offsets: &[(usize, usize)], supervised: &[Range<usize>]) -> Vec<bool> {
    offsets
        .iter()
        .map(|&(start, end)| start < end && supervised.iter().any(|s| start < s.end && end > s.start))
        .collect()
}
