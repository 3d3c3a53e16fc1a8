//! Converts a row to token ids and a mask, as described in the guide. Text: all tokens are supervised, with EOS at the
//! end. Prompt and completion: the completion and EOS are supervised. Conversation: the assistant turns with their
//! end-of-turn tokens are supervised, or what [`Learn`] says. Classification and regression: no token is added or
//! supervised; only the label counts. Words with labels are tokenised one by one, and the first token of each has its label.
//!
//! Prompts with answers are converted as in TRL's DPOTrainer: the prompt alone, and the prompt with each answer are
//! tokenised; the answers begin at the first token where the prompt alone differs from one of them. Texts get the end
//! token, conversations are as the chat template renders them. Each row is cut by itself.

use crate::data::Learn;
use crate::data::chat;
use crate::data::error::DataError;
use crate::data::form::{Alpaca, Chat, Form, Label, Said};
use crate::data::samples::{Encoded, NO_CLASS, Thought};
use crate::data::template::{ChatTemplate, Ending};
use crate::data::tokenizer::{Special, Tokenizer};
use serde_json::{Value, json};

/// Tokens, mask and label of a row of which only the first `most` tokens are kept. A row with more than `most` tokens
/// gives a result with more than `most` tokens, the first `most` of which are those of the whole row.
pub fn encode(
    form: &Form,
    tokenizer: &Tokenizer,
    (learn, most): (Learn, usize),
) -> Result<(Encoded, Option<Label>), DataError> {
    let encoded = match form {
        Form::Text(text) => whole_text(text, tokenizer, most)?,
        Form::Pair { prompt, completion } => pair((prompt, completion), tokenizer, (learn, most))?,
        Form::Alpaca(row) if tokenizer.template().is_some() => {
            // Its turns cannot be marked.
            let learn = if learn == Learn::Marked { Learn::Answers } else { learn };
            conversation(&alpaca_chat(row), tokenizer, (learn, most))?
        }
        Form::Alpaca(row) => pair((&alpaca_prompt(row), &row.output), tokenizer, (learn, most))?,
        Form::Chat(chat) => conversation(chat, tokenizer, (learn, most))?,
        Form::Answers { said, .. } => answers(said, tokenizer, most)?.encoded,
        Form::Class { text, label } => {
            let ids = tokenizer.beginning(text, Special::Add, most)?;
            return Ok((Encoded::new(vec![false; ids.len()], ids), Some(label.clone())));
        }
        Form::Words { words, tags } => {
            return Ok((tagged(words, tokenizer, (most, |word| tags[word].is_some()))?, None));
        }
        Form::Numbers { text, values } => {
            let ids = tokenizer.beginning(text, Special::Add, most)?;
            Encoded { values: values.clone(), ..Encoded::new(vec![false; ids.len()], ids) }
        }
    };
    Ok((encoded, None))
}

/// Tokens of words. The class of the first token of each word for which `learnt` holds is the number of the word, until
/// classes are known.
pub fn tagged(
    words: &[String],
    tokenizer: &Tokenizer,
    (most, learnt): (usize, impl Fn(usize) -> bool),
) -> Result<Encoded, DataError> {
    let (ids, words) = tokenizer.words(words, most)?;
    let begins = |i: usize| i == 0 || words[i - 1] != words[i];
    let class = |i: usize| words[i].filter(|word| begins(i) && learnt(*word as usize)).unwrap_or(NO_CLASS);
    let classes: Vec<u32> = (0..ids.len()).map(class).collect();
    let mask = classes.iter().map(|class| *class != NO_CLASS).collect();
    Ok(Encoded { classes, ..Encoded::new(mask, ids) })
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
    Ok(Encoded::new(vec![true; ids.len()], ids))
}

fn pair(
    (prompt, completion): (&str, &str),
    tokenizer: &Tokenizer,
    (learn, most): (Learn, usize),
) -> Result<Encoded, DataError> {
    let mut ids = tokenizer.beginning(prompt, Special::Add, most)?;
    let given = ids.len();
    if given <= most {
        ids.extend(tokenizer.beginning(completion, Special::Omit, most - given)?);
        ids.push(eos(tokenizer)?);
    }
    let mask = (0..ids.len()).map(|i| i >= given || learn == Learn::All).collect();
    let empty = chat::learns_no_thought(completion, std::slice::from_ref(&(0..completion.len())));
    let thought = Thought { empty, lost: false };
    Ok(Encoded { thought, ..Encoded::new(mask, ids) })
}

fn conversation(
    chat: &Chat,
    tokenizer: &Tokenizer,
    (learn, most): (Learn, usize),
) -> Result<Encoded, DataError> {
    let whole = chat::render(chat, tokenizer)?;
    let encoded = tokenizer.beginning_with_offsets(&whole.text, Special::Omit, most)?;
    let kept = encoded.offsets.iter().take(most).map(|&(_, end)| end).max().unwrap_or(0);
    let supervised = chat::supervised(chat, tokenizer, &whole, (learn, kept))?;
    let mask = chat::mask(&encoded.offsets, &supervised);
    Ok(Encoded {
        thought: chat::thought(chat, &whole.text, &supervised, learn),
        ..Encoded::new(mask, encoded.ids)
    })
}

/// Tokens of a prompt with its answers, one row after the other.
pub struct Answered {
    /// The rows; all tokens of the answers are supervised.
    pub encoded: Encoded,
    /// Whether an answer was cut.
    pub cut: bool,
    /// Whether no token of an answer is left.
    pub nothing: bool,
}

/// The tokens of the rows, `most` of each.
pub fn answers(said: &Said, tokenizer: &Tokenizer, most: usize) -> Result<Answered, DataError> {
    let (prompt, rows, special) = texts(said, tokenizer)?;
    let tokens = |text: &String| tokenizer.beginning(text, special, most);
    let (prompt, rows) = (tokens(&prompt)?, rows.iter().map(tokens).collect::<Result<Vec<_>, _>>()?);
    let common = |row: &Vec<u32>| prompt.iter().zip(row).take_while(|(a, b)| a == b).count();
    let begin = rows.iter().map(common).min().unwrap_or(0);
    // The first token of a row is not predicted.
    let nothing = rows.iter().any(|row| row.len().min(most) <= begin.max(1));
    let mut encoded = Encoded::new(Vec::new(), Vec::new());
    for row in &rows {
        encoded.second = encoded.ids.len() as u32;
        let kept = &row[..row.len().min(most)];
        encoded.ids.extend_from_slice(kept);
        encoded.mask.extend((0..kept.len()).map(|i| i >= begin));
    }
    Ok(Answered { encoded, cut: rows.iter().any(|row| row.len() > most), nothing })
}

/// The prompt, and the prompt with each answer.
fn texts(said: &Said, tokenizer: &Tokenizer) -> Result<(String, Vec<String>, Special), DataError> {
    let ended = |prompt: &str, answers: &[String]| -> Result<(String, Vec<String>, Special), DataError> {
        let eos = tokenizer
            .eos_token()
            .ok_or_else(|| DataError::Tokenizer("no eos_token (tokenizer_config.json names it)".into()))?;
        let row = |answer: &String| {
            let end = if answer.ends_with(eos) { "" } else { eos };
            format!("{prompt}{answer}{end}")
        };
        Ok((prompt.to_owned(), answers.iter().map(row).collect(), Special::Add))
    };
    match said {
        Said::Text { prompt, answers } => ended(prompt, answers),
        Said::Alpaca(row, answers) => match tokenizer.template() {
            None => ended(&alpaca_prompt(row), answers),
            Some(template) => {
                let Chat { messages, .. } = alpaca_chat(row);
                let mut prompt = messages.as_array().cloned().unwrap_or_default();
                prompt.pop();
                let answer = |text: &String| vec![json!({"role": "assistant", "content": text})];
                rendered(template, &prompt, &answers.iter().map(answer).collect::<Vec<_>>(), None)
            }
        },
        Said::Turns { prompt, answers, tools } => {
            let template = tokenizer.template().ok_or_else(chat::no_template)?;
            rendered(template, prompt, answers, tools.as_ref())
        }
    }
}

fn rendered(
    template: &ChatTemplate,
    prompt: &[Value],
    answers: &[Vec<Value>],
    tools: Option<&Value>,
) -> Result<(String, Vec<String>, Special), DataError> {
    let row = |answer: &Vec<Value>| {
        let messages = Value::Array([prompt, answer].concat());
        template.render(&messages, tools, Ending::Turn)
    };
    let alone = template.render(&Value::Array(prompt.to_vec()), tools, Ending::GenerationPrompt)?;
    Ok((alone, answers.iter().map(row).collect::<Result<_, _>>()?, Special::Omit))
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
