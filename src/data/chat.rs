//! The text of a conversation and its supervised byte ranges.
//!
//! If the template has generation blocks, they define the ranges of the assistant's turns unchanged. Without generation
//! blocks the span of assistant turn i is found by rendering twice: the conversation before the turn with the generation
//! prompt (P), and the conversation including the turn (F). P must be a prefix of F, both must be prefixes of the whole
//! text, and the span is the part of F after P. The span of another role's message begins with its content, and ends
//! with its end-of-turn token, as in Axolotl.
//!
//! A message's `train`, `training` or `weight` decides whether its span is supervised; [`Learn`] decides for messages
//! without such a mark.
//!
//! White space after the end-of-turn token of the span is removed: ChatML puts a newline there that belongs to no turn
//! and is not generated at inference (axolotl removes it too; TRL's Qwen templates, whose generation blocks include it,
//! can be used with --chat-template). Turns beyond the kept tokens are not located, because each one costs a rendering
//! of all earlier messages.
//!
//! Exception: a template may render a past turn differently (Qwen3 removes its thinking), so that the turn is shorter
//! in the whole text than in F. Such a turn is accepted if the text after P in the whole begins with a suffix of F and
//! that suffix contains the content of the message.

use crate::data::Learn;
use crate::data::error::DataError;
use crate::data::form::{Chat, mark};
use crate::data::samples::Thought;
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

pub(super) fn no_template() -> DataError {
    DataError::Template(
        "this model has none, and the row is a conversation: use --chat-template FILE or chatml".into(),
    )
}

/// Adds the first message without content to a template's error, because an empty message often causes it.
fn incomplete(chat: &Chat, error: DataError) -> DataError {
    let messages = chat.messages();
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

/// The supervised byte ranges of `whole`, ascending: at least all ranges that begin before byte `kept`.
pub fn supervised(
    chat: &Chat,
    tokenizer: &Tokenizer,
    whole: &Rendered,
    (learn, kept): (Learn, usize),
) -> Result<Vec<Range<usize>>, DataError> {
    let template = tokenizer.template().ok_or_else(no_template)?;
    let messages = chat.messages();
    let marks: Vec<Option<bool>> = messages.iter().map(|m| mark(m).unwrap_or_default()).collect();
    if let (Some(blocks), Learn::Answers) = (&whole.generation, learn)
        && marks.iter().all(Option::is_none)
    {
        let start = match chat.context {
            0 => 0,
            n => prefix(template, chat, n, Ending::GenerationPrompt)?.len(),
        };
        return Ok(blocks.iter().filter(|b| b.start >= start).cloned().collect());
    }
    let answer = |i: usize| i >= chat.context && is_answer(&messages[i]);
    let last = (0..messages.len()).rev().find(|&i| answer(i));
    let learnt = |i: usize| match learn {
        Learn::Answers => answer(i),
        Learn::Last => last == Some(i),
        Learn::Marked => false,
        Learn::All => true,
    };
    // With `all`, the messages that are not learnt are located, else those that are.
    let located = |i: &usize| marks[*i].unwrap_or(learnt(*i)) == (learn != Learn::All);
    let cut = |span| cut_after_end(&whole.text, span, tokenizer);
    let mut spans = Vec::new();
    for i in (0..messages.len()).filter(located) {
        let span = match &whole.generation {
            Some(blocks) if is_answer(&messages[i]) => block(blocks, messages, i)?,
            _ if is_answer(&messages[i]) => cut(turn(template, chat, i, &whole.text)?),
            _ => cut(other_turn(template, chat, i, &whole.text)?),
        };
        if span.start >= kept {
            break;
        }
        spans.push(span);
    }
    Ok(if learn == Learn::All { complement(&spans, whole.text.len()) } else { spans })
}

fn is_answer(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// The parts of `0..end` outside `spans`, which ascend.
fn complement(spans: &[Range<usize>], end: usize) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(spans.iter().map(|s| s.end));
    let ends = spans.iter().map(|s| s.start).chain([end]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|s| !s.is_empty()).collect()
}

/// The generation block of assistant message i, where each of these messages has one.
fn block(blocks: &[Range<usize>], messages: &[Value], i: usize) -> Result<Range<usize>, DataError> {
    let answers = messages.iter().filter(|m| is_answer(m)).count();
    if blocks.len() != answers {
        let blocks = blocks.len();
        return Err(DataError::Template(format!(
            "cannot tell which messages are trained on: {blocks} {{% generation %}} blocks for {answers} assistant \
             messages; use a --chat-template without them, or --learn answers without marked messages"
        )));
    }
    Ok(blocks[messages[..i].iter().filter(|m| is_answer(m)).count()].clone())
}

/// The byte range of message i of a role other than the assistant, from its content on.
fn other_turn(
    template: &ChatTemplate,
    chat: &Chat,
    i: usize,
    whole: &str,
) -> Result<Range<usize>, DataError> {
    let message = &chat.messages[i];
    let refuse = |what: &str| {
        let role = message.get("role").and_then(Value::as_str).unwrap_or("unknown");
        DataError::Template(format!(
            "cannot tell where message {} (role {role}) begins and ends: {what}; leave its `train` out",
            i + 1
        ))
    };
    let rendered = |n| {
        let failed = |e| refuse(&format!("rendering the first {n} messages alone fails: {e}"));
        prefix(template, chat, n, Ending::Turn).map_err(failed)
    };
    let before = if i == 0 { String::new() } else { rendered(i)? };
    let with = rendered(i + 1)?;
    if !with.starts_with(&before) || !whole.starts_with(&with) {
        return Err(refuse("the text up to it does not begin the whole conversation"));
    }
    let Some(text) = first_text(&mut message.clone()).map(|t| t.trim().to_owned()) else {
        // Without a text the whole turn.
        return Ok(before.len()..with.len());
    };
    let after = &with[before.len()..];
    match (after.find(&text), after.rfind(&text)) {
        (None, _) => Err(refuse("the template does not keep its content")),
        (Some(at), last) if last == Some(at) => Ok(before.len() + at..with.len()),
        // A header may contain the text too, as that of a user who says "user".
        _ => match marked(template, chat, i, &with) {
            Some(at) if at >= before.len() && with[at..].starts_with(&text) => Ok(at..with.len()),
            _ => Err(refuse("the template does not keep its content where it was")),
        },
    }
}

/// Where the content of message i begins in `with`, the text of the messages up to it: at the first difference from the
/// text that a mark in front of the content gives.
fn marked(template: &ChatTemplate, chat: &Chat, i: usize, with: &str) -> Option<usize> {
    let mut chat = chat.clone();
    let text = first_text(&mut chat.messages[i])?;
    let start = text.len() - text.trim_start().len();
    let mark = if text[start..].starts_with('\u{e000}') { '\u{e001}' } else { '\u{e000}' };
    text.insert(start, mark);
    let other = prefix(template, &chat, i + 1, Ending::Turn).ok()?;
    let same = with.chars().zip(other.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    (other != with).then_some(same)
}

/// The content of a message, or the first text of its parts.
fn first_text(message: &mut Value) -> Option<&mut String> {
    let text = match message.get_mut("content")? {
        Value::Array(parts) => parts.iter_mut().find_map(|part| part.get_mut("text"))?,
        whole => whole,
    };
    match text {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// The text of the first `n` messages.
fn prefix(template: &ChatTemplate, chat: &Chat, n: usize, ending: Ending) -> Result<String, DataError> {
    let messages = chat.messages();
    let head = Value::Array(messages[..n.min(messages.len())].to_vec());
    template.render(&head, chat.tools.as_ref(), ending)
}

/// The byte range of assistant turn i in `whole`.
fn turn(template: &ChatTemplate, chat: &Chat, i: usize, whole: &str) -> Result<Range<usize>, DataError> {
    let refuse = |what: &str| {
        let at = i + 1;
        let earlier =
            if chat.messages().len() > at { ", or train on the last answer alone: --learn last" } else { "" };
        DataError::Template(format!(
            "cannot tell where assistant message {at} begins and ends: {what}; \
             use --chat-template FILE with {{% generation %}} blocks, or chatml{earlier}"
        ))
    };
    let before = prefix(template, chat, i, Ending::GenerationPrompt)
        .map_err(|e| refuse(&format!("rendering the messages before it fails: {e}")))?;
    // The last turn ends at the end of `whole`, which saves one rendering for most rows.
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

/// Whether `text` contains the content of a message, or the name of a called tool if the message has no content.
fn holds_content(text: &str, message: &Value) -> bool {
    let content = message.get("content").and_then(Value::as_str).unwrap_or("");
    // Text before </think> is thinking, which a template may remove.
    let content = content.rsplit("</think>").next().unwrap_or(content).trim();
    if !content.is_empty() {
        return text.contains(content);
    }
    let call = message.get("tool_calls").and_then(|c| c.get(0));
    let name = call.and_then(|c| c.get("function").unwrap_or(c).get("name")).and_then(Value::as_str);
    name.is_some_and(|n| text.contains(n))
}

/// Removes white space after the end-of-turn token from `span`.
fn cut_after_end(whole: &str, span: Range<usize>, tokenizer: &Tokenizer) -> Range<usize> {
    let turn = &whole[span.clone()];
    let trimmed = turn.trim_end();
    if tokenizer.ends_with_special(trimmed) { span.start..span.start + trimmed.len() } else { span }
}

/// What is suspicious about the reasoning of a conversation with the text `whole`.
pub fn thought(chat: &Chat, whole: &str, supervised: &[Range<usize>], learn: Learn) -> Thought {
    let empty = learns_no_thought(whole, supervised);
    let last = chat.messages().iter().rposition(is_answer).unwrap_or_default();
    let first = if learn == Learn::Last { last } else { chat.context };
    let lost = chat.messages().iter().skip(first).any(|message| {
        let reasoning = reasoning(message).map(str::trim).filter(|text| !text.is_empty());
        is_answer(message) && reasoning.is_some_and(|text| !whole.contains(text))
    });
    Thought { empty, lost: lost && !supervised.is_empty() }
}

/// Whether the end of a think block without content is supervised. Its beginning may be a part of the prompt.
pub fn learns_no_thought(text: &str, supervised: &[Range<usize>]) -> bool {
    text.match_indices("<think>").any(|(at, open)| {
        let rest = text[at + open.len()..].trim_start();
        let end = text.len() - rest.len();
        rest.starts_with("</think>") && supervised.iter().any(|span| span.contains(&end))
    })
}

/// The reasoning of a message: a field of its own, or a think block in the content.
fn reasoning(message: &Value) -> Option<&str> {
    let field =
        ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| message.get(*name)?.as_str());
    field.or_else(|| {
        Some(message.get("content")?.as_str()?.split_once("<think>")?.1.split_once("</think>")?.0)
    })
}

/// One bit per token: whether the token overlaps a supervised range. A token without text is never supervised.
pub fn mask(offsets: &[(usize, usize)], supervised: &[Range<usize>]) -> Vec<bool> {
    offsets
        .iter()
        .map(|&(start, end)| start < end && supervised.iter().any(|s| start < s.end && end > s.start))
        .collect()
}
