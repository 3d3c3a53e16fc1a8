//! Determines the form of each row from the names of its fields, in this order: messages, conversations, preference
//! (rejected with an error; `--task dpo` and others read nothing else), instruction + output, prompt + completion, text.
//! Rows of a classifier and of a regression have text (or input) and label, those of token classification have tokens and
//! tags. Exception: a row that matches several forms has the first of them, unless `--data-fields FIELD=COLUMN` selects
//! another one.

mod preference;
mod turns;
mod words;

pub use preference::Said;
pub use turns::mark;

use crate::data::error::DataError;
use crate::data::{Options, Task};
use serde_json::{Map, Value, json};

/// A row with a known form.
#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// `text`.
    Text(String),
    /// `prompt` and `completion`.
    Pair {
        /// Not supervised.
        prompt: String,
        /// Supervised.
        completion: String,
    },
    /// `instruction`, `input`, `output`, `system`, `history`.
    Alpaca(Alpaca),
    /// `messages` or `conversations`.
    Chat(Chat),
    /// `prompt` with `chosen` and `rejected`, or with `completion` and `label`.
    Answers {
        /// The prompt and its answers.
        said: Said,
        /// Whether a single answer is wanted; None for two.
        wanted: Option<bool>,
    },
    /// `text` or `input`, with `label`.
    Class {
        /// The text to classify.
        text: String,
        /// The label as in the row.
        label: Label,
    },
    /// `tokens` with a label each.
    Words {
        /// The words.
        words: Vec<String>,
        /// Their labels; None for a word that is not learnt.
        tags: Vec<Option<Label>>,
    },
    /// `text` or `input`, with numbers as `label`.
    Numbers {
        /// The text that they belong to.
        text: String,
        /// Each finite and from -100 to 100; empty where the cell is.
        values: Vec<f32>,
    },
}

/// A row in Alpaca's form.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Alpaca {
    /// The system turn, if any.
    pub system: Option<String>,
    /// Earlier (user, assistant) turns.
    pub history: Vec<(String, String)>,
    /// The instruction.
    pub instruction: String,
    /// The input of the instruction; may be empty.
    pub input: String,
    /// The expected answer.
    pub output: String,
}

/// A conversation in the format of chat templates.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// A list of {role, content, ...}.
    pub messages: Value,
    /// Tool descriptions, if any.
    pub tools: Option<Value>,
    /// Number of leading messages that are context (the length of a `prompt` list): assistant turns among them are not
    /// supervised.
    pub context: usize,
}

/// The label of a row.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Label {
    /// An integer, or a text that is the canonical form of an integer (for example a CSV cell): `"3"`, not `"03"`.
    Int(i64),
    /// Any other text.
    Name(String),
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Int(i) => write!(f, "{i}"),
            Label::Name(s) => f.write_str(s),
        }
    }
}

/// The fields of a row, with the names of --data-fields.
struct Fields<'a> {
    row: &'a Map<String, Value>,
    renamed: &'a [(String, String)],
}

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.cell(field).filter(|v| !v.is_null())
    }

    /// The value of the field, including null.
    fn cell(&self, field: &str) -> Option<&'a Value> {
        let column = match self.renamed.iter().find(|(f, _)| f == field) {
            Some((_, column)) => column.as_str(),
            // The column of this name is assigned to another field.
            None if self.renamed.iter().any(|(_, column)| column == field) => return None,
            None => field,
        };
        self.row.get(column)
    }

    fn has(&self, fields: &[&str]) -> bool {
        fields.iter().all(|f| self.get(f).is_some())
    }

    /// The column names of the row.
    fn names(&self) -> String {
        self.row.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// The field that is null in the first form for which all fields exist.
    fn null<'f>(&self, forms: &[&[&'f str]]) -> Option<&'f str> {
        let there = |field: &&str| self.cell(field).is_some();
        let form = forms.iter().find(|form| form.iter().all(there))?;
        form.iter().copied().find(|field| self.get(field).is_none())
    }

    fn text(&self, field: &str) -> Result<String, String> {
        match self.get(field) {
            Some(Value::String(s)) => Ok(s.clone()),
            Some(other) => Err(format!("`{field}` must be a string, it is {}", kind(other))),
            None => Err(format!("`{field}` is missing")),
        }
    }

    /// A value that tables store as JSON text; None if it is missing or an empty text.
    fn structured(&self, field: &str) -> Result<Option<Value>, String> {
        match self.get(field) {
            Some(Value::String(s)) if s.trim().is_empty() => Ok(None),
            Some(Value::String(s)) => serde_json::from_str(s)
                .map(Some)
                .map_err(|e| format!("`{field}` is a text but not JSON: {e}")),
            other => Ok(other.cloned()),
        }
    }

    /// The text of the field, or an empty text if it is missing.
    fn optional(&self, field: &str) -> Result<String, String> {
        self.get(field).map_or(Ok(String::new()), |_| self.text(field))
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// All fields of all forms: the names that --data-fields may assign.
const FIELDS: [&str; 18] = [
    "text",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "messages",
    "conversations",
    "tools",
    "label",
    "chosen",
    "rejected",
    words::TOKENS,
    words::TAGS,
    MARGIN,
    WEIGHT,
];

/// The field with the margin of a pair.
const MARGIN: &str = "margin";

/// The field with the weight of a row.
const WEIGHT: &str = "weight";

/// Whether any form has a field of this name.
pub fn is_field(name: &str) -> bool {
    FIELDS.contains(&name)
}

/// Rejects unknown and repeated fields in --data-fields; the error for an unknown field names the most similar one.
pub fn check_fields(fields: &[(String, String)]) -> Result<(), DataError> {
    if let Some((i, (twice, _))) =
        fields.iter().enumerate().find(|(i, (f, _))| fields[..*i].iter().any(|(before, _)| before == f))
    {
        let columns =
            format!("{}, {}", fields.iter().find(|(f, _)| f == twice).map_or("", |(_, c)| c), fields[i].1);
        return Err(DataError::Options(format!(
            "--data-fields FIELD=COLUMN: the field `{twice}` is given twice ({columns}): leave one out"
        )));
    }
    let Some((unknown, _)) = fields.iter().find(|(f, _)| !FIELDS.contains(&f.as_str())) else {
        return Ok(());
    };
    let nearest = FIELDS
        .iter()
        .max_by(|a, b| strsim::jaro_winkler(a, unknown).total_cmp(&strsim::jaro_winkler(b, unknown)));
    Err(DataError::Options(format!(
        "--data-fields FIELD=COLUMN: no form has a field `{unknown}`, the nearest is `{}`",
        nearest.unwrap_or(&"text")
    )))
}

/// The form of a row; the error says what is missing.
pub fn of(row: &Value, options: &Options) -> Result<Form, String> {
    let map = row.as_object().ok_or_else(|| format!("a row must be an object, this is {}", kind(row)))?;
    let fields = Fields { row: map, renamed: &options.fields };
    match options.task {
        Task::Classify => classification(&fields),
        Task::Regress => regression(&fields),
        Task::Tag => words::of(&fields),
        Task::Sft => sft(&fields),
        Task::Pairs | Task::Reward => preference::pair(&fields),
        Task::Unpaired => preference::single(&fields),
    }
}

/// A row to be scored by a head of numbers.
#[derive(Debug, Clone, PartialEq)]
pub enum Scored {
    /// `text` or `input`, with the numbers of `label` if there are any.
    Text(String, Vec<f32>),
    /// A prompt with its answers.
    Answers(Said),
}

/// What is scored of a row; the error says what is missing.
pub fn scored(row: &Value, options: &Options) -> Result<Scored, String> {
    let map = row.as_object().ok_or_else(|| format!("a row must be an object, this is {}", kind(row)))?;
    let fields = Fields { row: map, renamed: &options.fields };
    let text = ["text", "input"].into_iter().find(|field| fields.has(&[field]));
    let has_answers = fields.has(&["chosen", "rejected"]) || fields.has(&["completion"]);
    let Some(field) = text.filter(|_| !has_answers) else {
        return preference::any(&fields).map(Scored::Answers);
    };
    let label = match options.task {
        Task::Regress => fields.get("label").map_or(Ok(Vec::new()), numbers)?,
        _ => Vec::new(),
    };
    Ok(Scored::Text(fields.text(field)?, label))
}

/// The words of a row, with their labels if there are any.
pub fn words(row: &Value, options: &Options) -> Result<Form, String> {
    let map = row.as_object().ok_or_else(|| format!("a row must be an object, this is {}", kind(row)))?;
    words::any(&Fields { row: map, renamed: &options.fields })
}

/// The factor of the losses of a row's tokens: the field `weight`, a number or its text. 1 for a row without one, and
/// where no text is learnt.
pub fn weight(row: &Value, options: &Options) -> Result<f32, String> {
    let (Task::Sft, Some(map)) = (options.task, row.as_object()) else { return Ok(1.0) };
    let fields = Fields { row: map, renamed: &options.fields };
    match fields.get(WEIGHT) {
        None => Ok(1.0),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(1.0),
        Some(value) => number(value, HEAVIEST).ok_or_else(|| format!(
            "`{WEIGHT}` multiplies the loss of the row: it must be a number from -{HEAVIEST} to {HEAVIEST}; if the column \
             means something else, --data-fields weight=none leaves it alone"
        )),
    }
}

/// The margin of a pair of rewards: the field `margin`, a number or its text. 0 for a row without one.
pub fn margin(row: &Value, options: &Options) -> Result<f32, String> {
    let (Task::Reward, Some(map)) = (options.task, row.as_object()) else { return Ok(0.0) };
    let fields = Fields { row: map, renamed: &options.fields };
    match fields.get(MARGIN) {
        None => Ok(0.0),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(0.0),
        Some(value) => number(value, LARGEST).ok_or_else(|| {
            format!(
                "`{MARGIN}` is what the chosen reward is above the rejected one at least: it must be a number from \
                 -{LARGEST} to {LARGEST}, it is {value}; if the column means something else, --data-fields margin=none \
                 leaves it alone"
            )
        }),
    }
}

/// A number, or the text of one, from -`most` to `most`.
fn number(value: &Value, most: f64) -> Option<f32> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number: &f64| number.abs() <= most).map(|number| number as f32)
}

/// Largest number that a head learns: the squares of 256 such errors stay within the exact sums (2^23), and an evaluation
/// packs no more of them.
const LARGEST: f64 = 100.0;

/// Largest weight of a row: a microbatch of 4,096 tokens with a loss of 20 each stays within the exact sums (2^23).
const HEAVIEST: f64 = 100.0;

fn sft(fields: &Fields<'_>) -> Result<Form, String> {
    for field in ["messages", "conversations"] {
        // In a table of mixed forms this cell can be empty.
        if fields.get(field).is_some_and(|v| v != "") {
            return chat(fields, field);
        }
    }
    if fields.has(&["chosen", "rejected"]) {
        return Err("preference rows (chosen / rejected) are for --task dpo, orpo, cpo or simpo: \
                    to train on the chosen answers, use --data-fields completion=chosen"
            .into());
    }
    if fields.has(&["instruction", "output"]) {
        return alpaca(fields).map(Form::Alpaca);
    }
    if fields.has(&["prompt", "completion"]) {
        return pair(fields);
    }
    if fields.has(&["text"]) {
        return fields.text("text").map(Form::Text);
    }
    if let Some(null) = fields.null(&[&["prompt", "completion"], &["instruction", "output"], &["text"]]) {
        return Err(format!("`{null}` is null: give it a text, or leave the row out"));
    }
    Err(format!(
        "no known form: it has the fields [{}]; known are text | prompt, completion | instruction, output | \
         messages | conversations | text, label (with --task classify); --data-fields FIELD=COLUMN renames",
        fields.names()
    ))
}

fn pair(fields: &Fields<'_>) -> Result<Form, String> {
    let as_list = |field| fields.get(field).and_then(Value::as_array).cloned();
    if let (Some(mut messages), Some(answer)) = (as_list("prompt"), as_list("completion")) {
        let context = messages.len();
        messages.extend(answer);
        let messages = turns::check_marks(turns::check(Value::Array(messages))?)?;
        return Ok(Form::Chat(Chat { messages, tools: tools(fields)?, context }));
    }
    Ok(Form::Pair { prompt: fields.text("prompt")?, completion: fields.text("completion")? })
}

fn alpaca(fields: &Fields<'_>) -> Result<Alpaca, String> {
    Ok(Alpaca { output: fields.text("output")?, ..question(fields)? })
}

/// Alpaca's fields without the output.
fn question(fields: &Fields<'_>) -> Result<Alpaca, String> {
    let history = match fields.structured("history")? {
        None => Vec::new(),
        Some(list) => serde_json::from_value(list)
            .map_err(|_| "`history` must be a list of [user, assistant] pairs".to_owned())?,
    };
    Ok(Alpaca {
        system: Some(fields.optional("system")?).filter(|s| !s.is_empty()),
        history,
        instruction: fields.text("instruction")?,
        input: fields.optional("input")?,
        output: String::new(),
    })
}

/// The text of a row, and its label.
fn labelled<'a>(fields: &Fields<'a>) -> Result<(String, &'a Value), String> {
    let missing = |field: &str| match fields.null(&[&[field]]) {
        Some(_) => format!("`{field}` is null: give it a value, or leave the row out"),
        None => format!(
            "`{field}` is missing: the columns are {}; --data-fields text=COLUMN,label=COLUMN names them",
            fields.names()
        ),
    };
    let field = if fields.has(&["input"]) && !fields.has(&["text"]) { "input" } else { "text" };
    if !fields.has(&[field]) {
        return Err(missing(field));
    }
    let label = fields.get("label").ok_or_else(|| missing("label"));
    Ok((fields.text(field)?, label?))
}

fn classification(fields: &Fields<'_>) -> Result<Form, String> {
    let (text, label) = labelled(fields)?;
    Ok(Form::Class { text, label: class("label", label)? })
}

/// The class that a value names.
fn class(field: &str, value: &Value) -> Result<Label, String> {
    Ok(match value {
        Value::String(s) => match s.parse::<i64>() {
            Ok(i) if i.to_string() == *s => Label::Int(i),
            _ => Label::Name(s.clone()),
        },
        Value::Bool(b) => Label::Name(b.to_string()),
        Value::Number(n) => {
            match n.as_i64().or_else(|| n.as_f64().filter(|x| x.fract() == 0.0).map(|x| x as i64)) {
                Some(i) => Label::Int(i),
                None => return Err(format!("`{field}` must be an integer or a string, it is {n}")),
            }
        }
        other => return Err(format!("`{field}` must be an integer or a string, it is {}", kind(other))),
    })
}

fn regression(fields: &Fields<'_>) -> Result<Form, String> {
    let (text, label) = labelled(fields)?;
    Ok(Form::Numbers { text, values: numbers(label)? })
}

/// The numbers of a label; none of an empty cell.
fn numbers(label: &Value) -> Result<Vec<f32>, String> {
    let one = |value: &Value| number(value, LARGEST);
    let values = match label {
        Value::String(cell) if cell.trim().is_empty() => Some(Vec::new()),
        Value::Array(list) if !list.is_empty() => list.iter().map(one).collect(),
        // A list in a cell of a table.
        Value::String(cell) if cell.trim_start().starts_with('[') => {
            let list: Vec<Value> = serde_json::from_str(cell).unwrap_or_default();
            list.iter().map(one).collect::<Option<Vec<_>>>().filter(|values| !values.is_empty())
        }
        value => one(value).map(|value| vec![value]),
    };
    values.ok_or_else(|| {
        format!(
            "`label` must be a number from -{LARGEST} to {LARGEST}, or a list of such numbers, it is {label}: scale \
             larger ones"
        )
    })
}

fn chat(fields: &Fields<'_>, field: &str) -> Result<Form, String> {
    let Some(Value::Array(list)) = fields.structured(field)? else {
        return Err(format!("`{field}` must be a list of messages"));
    };
    let mut messages: Vec<Value> = match field {
        "messages" => list,
        _ => list.iter().map(turns::sharegpt).collect::<Result<_, _>>()?,
    };
    let system = fields.optional("system")?;
    let has_system = messages.first().and_then(|m| m.get("role")).is_some_and(|r| r == "system");
    if !system.is_empty() && !has_system {
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    Ok(Form::Chat(Chat {
        messages: turns::check_marks(turns::check(Value::Array(messages))?)?,
        tools: tools(fields)?,
        context: 0,
    }))
}

/// The tools of a row; an empty list counts as no tools.
fn tools(fields: &Fields<'_>) -> Result<Option<Value>, String> {
    match fields.structured("tools")? {
        None => Ok(None),
        Some(Value::Array(list)) if list.is_empty() => Ok(None),
        Some(tools @ Value::Array(_)) => Ok(Some(tools)),
        Some(other) => Err(format!("`tools` must be a list, it is {}", kind(&other))),
    }
}
