//! Converts a row to token ids and a mask, as described in the guide. Text: all tokens are supervised, with EOS at the
//! end. Prompt and completion: the completion and EOS are supervised. Conversation: the assistant turns with their
//! end-of-turn tokens are supervised. Classification: no token is added or supervised; only the label counts.

use crate::data::chat;
use crate::data::error::DataError;
use crate::data::form::{Alpaca, Chat, Form, Label};
use crate::data::samples::Encoded;
use crate::data::tokenizer::{Special, Tokenizer};
use serde_json::{Value, json};

/// Tokens, mask and label of a row of which only the first `most` tokens are kept. A row with more than `most` tokens
/// gives a result with more than `most` tokens, the first `most` of which are those of the whole row.
pub fn encode(
    form: &Form,
    tokenizer: &Tokenizer,
    most: usize,
) -> Result<(Encoded, Option<Label>), DataError> {
    let encoded = match form {
        Form::Text(text) => whole_text(text, tokenizer, most)?,
        Form::Pair { prompt, completion } => pair((prompt, completion), tokenizer, most)?,
        Form::Alpaca(row) if tokenizer.template().is_some() => {
            conversation(&alpaca_chat(row), tokenizer, most)?
        }
        Form::Alpaca(row) => pair((&alpaca_prompt(row), &row.output), tokenizer, most)?,
        Form::Chat(chat) => conversation(chat, tokenizer, most)?,
        Form::Class { text, label } => {
            let ids = tokenizer.beginning(text, Special::Add, most)?;
            return Ok((Encoded { mask: vec![false; ids.len()], ids }, Some(label.clone())));
        }
    };
    Ok((encoded, None))
}

fn eos(tokenizer: &Tokenizer) -> Result<u32, DataError> {
    tokenizer.eos_id().ok_or_else(|| {
        DataError::Tokenizer("no eos_token that is in its vocabulary (tokenizer_config.json names it)".into())
    })
}

fn whole_text(text: &str, tokenizer: &Tokenizer, most: usize) -> Result<Encoded, DataError> {
    let (mut ids, eos) = (tokenizer.beginning(text, Special::Add, most)?, eos(tokenizer)?);
    if ids.last() != Some(&eos) {
        ids.push(eos);
    }
    Ok(Encoded { mask: vec![true; ids.len()], ids })
}

fn pair(
    (prompt, completion): (&str, &str),
    tokenizer: &Tokenizer,
    most: usize,
) -> Result<Encoded, DataError> {
    let mut ids = tokenizer.beginning(prompt, Special::Add, most)?;
    let given = ids.len();
    if given <= most {
        ids.extend(tokenizer.beginning(completion, Special::Omit, most - given)?);
        ids.push(eos(tokenizer)?);
    }
    Ok(Encoded { mask: (0..ids.len()).map(|i| i >= given).collect(), ids })
}

fn conversation(chat: &Chat, tokenizer: &Tokenizer, most: usize) -> Result<Encoded, DataError> {
    let whole = chat::render(chat, tokenizer)?;
    let encoded = tokenizer.beginning_with_offsets(&whole.text, Special::Omit, most)?;
    let kept = encoded.offsets.iter().take(most).map(|&(_, end)| end).max().unwrap_or(0);
    let supervised = chat::supervised(chat, tokenizer, &whole, kept)?;
    Ok(Encoded { mask: chat::mask(&encoded.offsets, &supervised), ids: encoded.ids })
}

/// The instruction, and the input on a new line if there is one.
fn question(row: &Alpaca) -> String {
    if row.input.is_empty() { row.instruction.clone() } else { format!("{}\n{}", row.instruction, row.input) }
}

fn alpaca_chat(row: &Alpaca) -> Chat {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut messages: Vec<Value> = row.system.iter().map(|s| turn("system", s)).collect();
    for (user, assistant) in &row.history {
        messages.extend([turn("user", user), turn("assistant", assistant)]);
    }
    messages.extend([turn("user", &question(row)), turn("assistant", &row.output)]);
    Chat { messages: Value::Array(messages), tools: None, context: 0 }
}

/// The prompt format of the Alpaca project, for models without a chat template. A system text replaces its first
/// sentence; earlier turns precede the instruction as context.
fn alpaca_prompt(row: &Alpaca) -> String {
    let preamble = match (&row.system, row.input.is_empty()) {
        (Some(system), _) => system.as_str(),
        (None, false) => {
            "Below is an instruction that describes a task, paired with an input that provides further context. \
             Write a response that appropriately completes the request."
        }
        (None, true) => {
            "Below is an instruction that describes a task. \
             Write a response that appropriately completes the request."
        }
    };
    let mut out = format!("{preamble}\n\n");
    for (user, assistant) in &row.history {
        out += &format!("### Instruction:\n{user}\n\n### Response:\n{assistant}\n\n");
    }
    out += &format!("### Instruction:\n{}\n\n", row.instruction);
    if !row.input.is_empty() {
        out += &format!("### Input:\n{}\n\n", row.input);
    }
    out + "### Response:\n"
}
