//! The text model of a checkpoint with a vision tower, as the configuration of a text model.

use super::read::Fields;
use super::{ConfigError, key, unsupported};
use crate::families::wrapped::{ALL, Wrapper};
use serde_json::{Value, json};

/// The class of the checkpoint and the configuration of its text model; `None` where the checkpoint is a text model, or
/// of a class that is not known.
pub(super) fn text_model(json: &Value) -> Result<Option<(&'static Wrapper, Value)>, ConfigError> {
    let fields = Fields::new(json)?;
    let named = fields.strings("architectures")?;
    let Some(class) = named.into_iter().find(|name| ALL.iter().any(|w| w.class == *name)) else {
        return Ok(None);
    };
    let Some(text) = fields.object("text_config") else {
        return Err(key("text_config", format!("is missing (architecture {class})")));
    };
    let named = Fields::of(text).text("model_type")?;
    let known: Vec<&Wrapper> = ALL.iter().filter(|w| w.class == class).collect();
    // A missing type is that of the class's own text model, which is the last.
    let wrapper = match named {
        Some(name) => known.iter().find(|w| w.text_type == name),
        None => known.last(),
    };
    let Some(&wrapper) = wrapper else {
        let types: Vec<_> = known.iter().map(|w| w.text_type).collect();
        return Err(unsupported(
            format!("a text model of type {} in {class}", named.unwrap_or_default()),
            format!("use a checkpoint whose text model is of type {}", types.join(" or ")),
        ));
    };
    let mut text = text.clone();
    for (name, value) in wrapper.defaults {
        text.entry(*name).or_insert(json!(value));
    }
    text.insert("architectures".into(), json!([format!("{}ForCausalLM", wrapper.family.name)]));
    text.insert("model_type".into(), json!(wrapper.family.model_type));
    // The head belongs to the whole checkpoint.
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(wrapper.tied);
    text.insert("tie_word_embeddings".into(), json!(tied));
    Ok(Some((wrapper, Value::Object(text))))
}
