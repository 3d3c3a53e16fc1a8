//! The reference that answers are compared with: the base model without an adapter, or with that of
//! --reference-adapter. It scores all answers before the first step. The log-probabilities stay in the run's folder,
//! under the hash of everything that they depend on, so that a resumed run does not compute them again.

use super::Job;
use crate::config::groups::{ComputeDtype, Options};
use crate::config::refusal::Refusal;
use crate::data::Corpus;
use crate::format::{FormatError, atomic};
use crate::model::decoder::base_parameters;
use crate::model::preference::Objective;
use crate::model::quantised::Recipe;
use crate::run::adapter::{self, Writer};
use crate::run::folder::REFERENCE as FILE;
use crate::run::prepare::Prepared;
use crate::support::stderr::say;
use crate::train::Known;
use crate::train::checkpoint::Identity;
use std::path::Path;

/// The parameters of the reference and the hash of what its log-probabilities depend on.
pub(super) struct Reference {
    pub objective: Objective,
    /// `None` if the loss has no reference.
    pub parameters: Option<Vec<f32>>,
    key: blake3::Hash,
}

impl Reference {
    /// The reference of the options; `None` if no answers are compared.
    pub fn new(
        p: &Prepared,
        writer: &Writer,
        model_hash: &str,
        options: &Options,
    ) -> Result<Option<Self>, Refusal> {
        let Some(objective) = options.data.objective else { return Ok(None) };
        let base = || base_parameters(&writer.layout, &p.spec, &*p.base.files.tensors);
        let mut parameters = objective.loss.has_reference().then(base).transpose()?;
        if let (Some(values), Some(dir)) = (&mut parameters, &options.data.reference) {
            *values = adapter::read_reference(dir, &p.config, &p.spec)?;
        }
        let mut hasher = blake3::Hasher::new();
        let eval = p.eval.as_ref().map_or("", |eval: &Corpus| &eval.hash);
        let dtype = match options.devices.dtype {
            ComputeDtype::Auto => String::new(),
            dtype => format!("{dtype:?}"),
        };
        let quantize = options.model.quantize.map_or("", Recipe::name);
        for part in [model_hash, &p.train.hash, eval, &dtype, quantize] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.update(bytemuck::cast_slice(parameters.as_deref().unwrap_or_default()));
        Ok(Some(Reference { objective, parameters, key: hasher.finalize() }))
    }

    /// Adds what determines the numbers of the run.
    pub fn identify(&self, identity: Identity) -> Identity {
        let o = &self.objective;
        identity
            .with("loss", o.loss.name())
            .with("beta", o.beta)
            .with("label_smoothing", o.smoothing)
            .with("simpo_gamma", o.gamma)
            .with("nll_weight", o.nll)
            .with_some("reference_adapter", o.loss.has_reference().then(|| self.key.to_hex()))
    }

    /// A note about the loss.
    pub fn note(&self, options: &Options) -> String {
        let o = &self.objective;
        let against = match &options.data.reference {
            Some(dir) => format!(", against the base with {}", dir.display()),
            None if o.loss.has_reference() => ", against the base without an adapter".into(),
            None => String::new(),
        };
        format!("loss     {}, beta {}{against}", o.loss.name(), o.beta)
    }

    /// The log-probabilities in the file of `dir`, if they are those of this reference.
    fn read(&self, dir: &Path) -> Option<Known> {
        let bytes = std::fs::read(dir.join(FILE)).ok()?;
        let (body, sum) = bytes.split_last_chunk::<32>()?;
        if blake3::hash(body).as_bytes() != sum {
            say!("warning: {}: damaged: the reference scores all answers again", dir.join(FILE).display());
            return None;
        }
        let (key, rest) = body.split_first_chunk::<32>()?;
        let (train, values) = rest.split_first_chunk::<8>()?;
        let mut values: Vec<f64> = values.as_chunks::<8>().0.iter().map(|v| f64::from_le_bytes(*v)).collect();
        let train = usize::try_from(u64::from_le_bytes(*train)).ok()?;
        let known = (key == self.key.as_bytes() && train <= values.len()).then(|| values.split_off(train));
        known.map(|eval| Known([values, eval]))
    }

    /// Writes the log-probabilities to the file in `dir`.
    pub fn write(&self, dir: &Path, known: &Known) -> Result<(), FormatError> {
        let Known([train, eval]) = known;
        let mut bytes = self.key.as_bytes().to_vec();
        bytes.extend((train.len() as u64).to_le_bytes());
        bytes.extend(train.iter().chain(eval).flat_map(|v| v.to_le_bytes()));
        bytes.extend(*blake3::hash(&bytes).as_bytes());
        atomic::write_file(&dir.join(FILE), &bytes)
    }
}

impl Job {
    /// The log-probabilities under the reference that the run, or the one that it continues, has computed.
    pub(super) fn known(&self, reference: &Reference, dir: &Path) -> Known {
        let from = self.from.as_deref().and_then(Path::parent);
        [Some(dir), from].into_iter().flatten().find_map(|dir| reference.read(dir)).unwrap_or_default()
    }
}
