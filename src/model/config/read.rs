//! Typed reading of config.json. A null key counts as missing; a key of the wrong type is an error.

use super::{ConfigError, key, unsupported};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The top-level object of a config.json, or an object nested in it.
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn new(json: &'a Value) -> Result<Self, ConfigError> {
        match json {
            Value::Object(map) => Ok(Fields(map)),
            _ => Err(key("{", "is missing: the file does not hold a JSON object")),
        }
    }

    pub(super) fn of(map: &'a Map<String, Value>) -> Self {
        Fields(map)
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    /// Whether the key is present, even as null.
    pub(super) fn mentions(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn object(&self, name: &str) -> Option<&'a Map<String, Value>> {
        self.get(name).and_then(Value::as_object)
    }

    /// Whether the key holds anything but null and false.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some_and(|v| *v != Value::Bool(false))
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_array().map(Some).ok_or_else(|| key(name, "is not a list"))
    }

    pub(super) fn objects(&self) -> impl Iterator<Item = (&'a String, &'a Map<String, Value>)> {
        self.0.iter().filter_map(|(name, v)| Some((name, v.as_object()?)))
    }

    pub(super) fn optional_size(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(key(
                name,
                format!("is {value}, not a whole number from {} to {}", range.start(), range.end()),
            )),
        }
    }

    pub(super) fn size(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize, ConfigError> {
        self.optional_size(name, range)?.ok_or_else(|| key(name, "is missing"))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(n) if n.is_finite() => Ok(Some(n)),
            _ => Err(key(name, format!("is {value}, not a number"))),
        }
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| key(name, format!("is {value}, not true or false")))
    }

    /// Dropout in front of a head that labels tokens, as transformers chooses it.
    pub(super) fn tag_dropout(&self) -> Result<f32, ConfigError> {
        for name in ["classifier_dropout", "hidden_dropout"] {
            match self.number(name)? {
                None => {}
                Some(share) if (0.0..1.0).contains(&share) => return Ok(share as f32),
                Some(share) => return Err(key(name, format!("is {share}, not a share of 0 to 1"))),
            }
        }
        Ok(0.1)
    }

    /// Refuses a head that labels tokens without a bias.
    pub(super) fn biased_tags(&self) -> Result<(), ConfigError> {
        match self.flag("token_classification_bias")? {
            Some(false) => {
                let way = "only heads with a bias label tokens here";
                Err(unsupported("`token_classification_bias: false`", way))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| key(name, format!("is {value}, not a string")))
    }

    /// Returns a list of strings; empty where the key is missing.
    pub(super) fn strings(&self, name: &str) -> Result<Vec<&'a str>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let strings = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        strings.ok_or_else(|| key(name, "is not a list of strings"))
    }
}

#[cfg(test)]
mod tests {
    use super::Fields;
    use crate::model::config::Config;
    use serde_json::{Value, json};

    #[test]
    fn dropout_in_front_of_a_head_is_that_of_transformers() {
        let of = |json: Value| Fields::new(&json).unwrap().tag_dropout();
        assert_eq!(of(json!({})), Ok(0.1));
        assert_eq!(of(json!({"classifier_dropout": null, "hidden_dropout": 0.25})), Ok(0.25));
        assert_eq!(of(json!({"classifier_dropout": 0.0, "hidden_dropout": 0.25})), Ok(0.0));
        for (key, value) in [("classifier_dropout", json!(1.0)), ("hidden_dropout", json!("a"))] {
            let error = of(json!({ key: value })).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }

    /// A value that nothing uses refuses no model, but a head that would need it.
    #[test]
    fn impossible_dropout_is_refused_where_a_head_is_added() {
        let base = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 1, "num_attention_heads": 2, "classifier_dropout": 2,
        });
        let labels = vec!["a".to_owned(), "b".to_owned()];
        let config = Config::from_json(&base).unwrap();
        assert!(config.clone().into_classifier(labels.clone()).is_ok());
        let error = config.into_tagger(labels).unwrap_err().to_string();
        assert!(error.contains("classifier_dropout"), "{error}");
    }
}
