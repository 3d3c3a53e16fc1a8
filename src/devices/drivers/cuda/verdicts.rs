//! Verdicts of the trials of NVIDIA's cards between processes, in the user's cache folder: one file per model of card,
//! driver and set of kernels. Cards of one model thus have one class in all processes, and a list of devices or a plan
//! names it without launching a kernel. An unreadable file counts as missing.

use crate::backend::cuda::{Device, kernels, patience_in_trials};
use crate::config::cache;
use crate::format::atomic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Kernels that need a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Products in f16 (sm_70).
    F16,
    /// Products by wgmma (sm_90a).
    Products,
    /// Attention by wgmma (sm_90a).
    Attention,
}

impl Tier {
    const ALL: [Tier; 3] = [Tier::F16, Tier::Products, Tier::Attention];

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Tier::F16 => "f16",
            Tier::Products => "products",
            Tier::Attention => "attention",
        }
    }

    /// The tier with that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.name() == name)
    }

    /// What a card without it does.
    pub fn without(self) -> &'static str {
        match self {
            Tier::F16 => "products stay in f32",
            Tier::Products => "products stay with mma",
            Tier::Attention => "attention stays with mma",
        }
    }
}

/// What a trial decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// Whether the tier is used forward.
    pub forward: bool,
    /// Whether it is used backward.
    pub backward: bool,
    /// Why not everywhere.
    pub why: Option<String>,
}

impl Verdict {
    /// The tier is not used, for this reason.
    pub fn no(why: String) -> Self {
        Verdict { forward: false, backward: false, why: Some(why) }
    }
}

/// The verdicts on a card's tiers.
pub type Verdicts = BTreeMap<Tier, Verdict>;

/// The verdicts of this process, by key. Trials run while this is held: a card has one, because its class must not
/// change.
pub struct Known(MutexGuard<'static, BTreeMap<String, Verdicts>>);

/// Waits for the trials of other threads.
pub fn known() -> Known {
    static KNOWN: Mutex<BTreeMap<String, Verdicts>> = Mutex::new(BTreeMap::new());
    Known(KNOWN.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Known {
    /// The verdicts of this key, by this process or an earlier one.
    pub fn of(&mut self, key: &str) -> &mut Verdicts {
        self.0.entry(key.into()).or_insert_with(|| stored(key))
    }
}

fn stored(key: &str) -> Verdicts {
    let bytes = path(key).and_then(|path| std::fs::read(path).ok());
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Adds one to those on disk, and returns the one that counts: another process may have added one since. Where they cannot
/// be written the next process tries again.
pub fn keep(key: &str, tier: Tier, verdict: Verdict) -> Verdict {
    let mut all = stored(key);
    let counts = all.entry(tier).or_insert(verdict).clone();
    if let (Some(path), Ok(bytes)) = (path(key), serde_json::to_vec(&all)) {
        let _ = atomic::write_file(&path, &bytes);
    }
    counts
}

/// The name of a card, its compute capability, its driver, the text of all kernels, the version of the program that
/// launches them, and how long a trial waits, hashed.
pub fn key(card: &Device, driver: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    let (major, minor) = card.capability;
    hasher.update(format!("{}\n{major}.{minor}\n{driver}\n", card.name).as_bytes());
    hasher.update(format!("{}\n{}\n", env!("CARGO_PKG_VERSION"), patience_in_trials().as_secs()).as_bytes());
    for source in kernels::SOURCES {
        hasher.update(source.text.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_string()
}

fn path(key: &str) -> Option<PathBuf> {
    Some(cache::folder()?.join("trials").join(format!("{key}.json")))
}
