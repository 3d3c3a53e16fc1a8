//! `--to peft`: the adapter alone, in PEFT's form.

use super::super::adapter::{self, Writer};
use super::super::refusal::Refusal;
use super::Source;
use super::logits::{fits, logits, probe};
use crate::format::atomic;
use serde_json::{Value, json};
use std::path::Path;

/// Writes the folder and compares it with what is in memory.
pub fn write(source: &Source, out: &Path) -> Result<Value, Refusal> {
    let (base, loaded) = (&source.base, &source.loaded);
    fits(source, None)?;
    let writer = Writer::new(base, &loaded.config, &loaded.spec, None);
    atomic::write_dir(out, |dir| {
        writer.write(dir, &loaded.flat)?;
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
