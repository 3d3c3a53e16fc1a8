//! Rows of token classification: a list of words, and a list of their labels.

use super::{Fields, Form, Label, class, kind};
use serde_json::Value;

/// The field with the words.
pub const TOKENS: &str = "tokens";

/// The field with the labels; rows may call it otherwise.
pub const TAGS: &str = "tags";

/// Other names of the field with the labels.
pub const OTHERS: [&str; 2] = ["ner_tags", "labels"];

/// Words that are not learnt have this label in data sets made for torch.
const IGNORED: Label = Label::Int(-100);

/// The form of a row with a label for each word.
pub fn of(fields: &Fields<'_>) -> Result<Form, String> {
    let words = words(fields)?;
    let Some((field, list)) = tags(fields)? else {
        return Err(format!(
            "`{TAGS}` is missing (also: {}): the columns are {}; --data-fields {TAGS}=COLUMN names it",
            OTHERS.join(", "),
            fields.names()
        ));
    };
    if list.len() != words.len() {
        return Err(format!("`{field}` has {} labels for {} words in `{TOKENS}`", list.len(), words.len()));
    }
    let tags = list.iter().map(|value| label(field, value)).collect::<Result<_, _>>()?;
    Ok(Form::Words { words, tags })
}

/// The same, where labels may be missing: no word then has one.
pub fn any(fields: &Fields<'_>) -> Result<Form, String> {
    match tags(fields)? {
        Some(_) => of(fields),
        None => words(fields).map(|words| Form::Words { tags: vec![None; words.len()], words }),
    }
}

fn words(fields: &Fields<'_>) -> Result<Vec<String>, String> {
    let found = fields.structured(TOKENS)?;
    let Some(Value::Array(list)) = found else {
        return Err(match found {
            Some(other) => format!("`{TOKENS}` must be a list of words, it is {}", kind(&other)),
            None => format!(
                "`{TOKENS}` is missing: the columns are {}; --data-fields {TOKENS}=COLUMN names it",
                fields.names()
            ),
        });
    };
    let word = |value| match value {
        Value::String(word) => Ok(word),
        other => Err(format!("`{TOKENS}` must be a list of words, it has {}", kind(&other))),
    };
    list.into_iter().map(word).collect()
}

/// The field with labels, and its list.
fn tags(fields: &Fields<'_>) -> Result<Option<(&'static str, Vec<Value>)>, String> {
    for field in [TAGS].into_iter().chain(OTHERS) {
        match fields.structured(field)? {
            None => {}
            Some(Value::Array(list)) => return Ok(Some((field, list))),
            Some(other) => return Err(format!("`{field}` must be a list of labels, it is {}", kind(&other))),
        }
    }
    Ok(None)
}

fn label(field: &str, value: &Value) -> Result<Option<Label>, String> {
    if value.is_null() {
        return Ok(None);
    }
    Ok(Some(class(field, value)?).filter(|label| *label != IGNORED))
}
