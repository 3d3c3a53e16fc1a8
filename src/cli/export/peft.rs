//! `--to peft`: the adapter alone, in PEFT's form.

use super::Exported;
use super::logits::{fits, logits, probe};
use crate::config::refusal::Refusal;
use crate::format::{atomic, peft};
use crate::run::adapter::{self, Writer};
use serde_json::{Value, json};
use std::path::Path;

/// Writes the folder and compares it with the adapter in memory. The base's name and the card are copied from the
/// adapter in `from`, because they contain more than its values do.
pub fn write(source: &Exported, from: &Path, out: &Path) -> Result<Value, Refusal> {
    let (base, loaded) = (&source.base, &source.loaded);
    fits(source, None)?;
    let mut writer = Writer::new(base, &loaded.config, &loaded.spec, None);
    let named = peft::config(from)?;
    if named.base_model_name_or_path.is_some() {
        writer.config.base_model_name_or_path = named.base_model_name_or_path;
        writer.config.revision = named.revision;
    }
    atomic::write_dir(out, |dir| {
        writer.write(dir, &loaded.flat, &[])?;
        if let Ok(card) = std::fs::read(from.join(peft::CARD)) {
            atomic::write_file(&dir.join(peft::CARD), &card)?;
        }
        let again = adapter::load(dir, base)?;
        let probe = probe(&loaded.config);
        let tensors = &*base.files.tensors;
        let memory =
            logits(&source.devices, (&loaded.config, tensors, &loaded.spec), Some(&loaded.flat), &probe)?;
        let disk = logits(&source.devices, (&again.config, tensors, &again.spec), Some(&again.flat), &probe)?;
        adapter::same_logits(&memory, &disk, out)?;
        let compared = "read back: the same logits, bit for bit";
        Ok(json!({ "kind": "peft", "compared": compared, "largest_difference": 0.0 }))
    })
}
