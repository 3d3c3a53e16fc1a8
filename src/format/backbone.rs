//! The text model in a checkpoint with a vision tower, under the names of a text model.

use crate::families::wrapped::{ALL, text_name};
use crate::numeric::block::Blocks;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A checkpoint whose text model was changed.
pub struct Checkpoint<'a> {
    /// The text model, under the names of a text model.
    pub text: &'a dyn Tensors,
    /// The checkpoint as it was.
    pub whole: &'a dyn Tensors,
}

/// The tensors of the text model; those of other parts do not exist here.
struct Backbone {
    whole: Arc<dyn Tensors>,
    /// Names in the checkpoint.
    stored: BTreeMap<String, String>,
}

/// The tensors of the text model of a checkpoint with this config.json; `None` where it has no other parts.
pub fn text_model(config: &Value, whole: &Arc<dyn Tensors>) -> Option<Arc<dyn Tensors>> {
    let named = config["architectures"].as_array()?;
    named.iter().find(|name| ALL.iter().any(|w| *name == w.class))?;
    let stored = whole.names().into_iter().filter_map(|name| Some((text_name(&name)?, name))).collect();
    Some(Arc::new(Backbone { whole: whole.clone(), stored }))
}

impl Tensors for Backbone {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        self.stored.get(name).map_or(Ok(None), |stored| self.whole.tensor(stored))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        self.stored.get(name).map_or(Ok(None), |stored| self.whole.blocks(stored))
    }

    fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
        self.stored.get(name).map_or(Ok(None), |stored| self.whole.block_parts(stored))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        self.stored.get(name).map_or(Ok(None), |stored| self.whole.about(stored))
    }

    fn names(&self) -> Vec<String> {
        self.stored.keys().cloned().collect()
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.whole.file_of(self.stored.get(name).map_or(name, String::as_str))
    }

    fn advise(&self, name: &str, when: Use) {
        if let Some(stored) = self.stored.get(name) {
            self.whole.advise(stored, when);
        }
    }
}

impl Tensors for Checkpoint<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        text_name(name).map_or_else(|| self.whole.tensor(name), |text| self.text.tensor(&text))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        text_name(name).map_or_else(|| self.whole.about(name), |text| self.text.about(&text))
    }

    fn names(&self) -> Vec<String> {
        self.whole.names()
    }
}
