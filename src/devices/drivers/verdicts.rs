//! Results of the trials of NVIDIA's cards between processes, in the user's cache folder: one file per model of card,
//! driver and set of kernels. Cards of one model thus have one class in all processes, and a list of devices or a plan
//! names it without launching a kernel. An unreadable file counts as missing.

use crate::backend::cuda::{Device, Flash, kernels};
use crate::config::cache;
use crate::format::atomic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the trials of a card decided; `None` where none did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verdicts {
    /// Products in f16 (sm_70).
    pub f16: Option<bool>,
    /// Products by wgmma (sm_90a).
    pub wgmma: Option<bool>,
    /// Attention by wgmma: forward, backward.
    pub attention: Option<[bool; 2]>,
}

impl Verdicts {
    /// The directions of attention by wgmma.
    pub fn flash(&self) -> Flash {
        let [forward, backward] = self.attention.unwrap_or_default();
        Flash { forward, backward }
    }
}

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
    pub fn of(&mut self, key: &str) -> Verdicts {
        let stored = || path(key).and_then(|path| std::fs::read(path).ok());
        let read = || stored().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        *self.0.entry(key.into()).or_insert_with(read)
    }

    /// Keeps them. Where they cannot be written the next process tries again.
    pub fn keep(&mut self, key: &str, verdicts: Verdicts) {
        if self.0.insert(key.into(), verdicts) == Some(verdicts) {
            return;
        }
        let (Some(path), Ok(bytes)) = (path(key), serde_json::to_vec(&verdicts)) else { return };
        if path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok()) {
            let _ = atomic::write_file(&path, &bytes);
        }
    }
}

/// The name of a card, its compute capability, its driver and the text of all kernels, hashed.
pub fn key(card: &Device, driver: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    let (major, minor) = card.capability;
    hasher.update(format!("{}\n{major}.{minor}\n{driver}\n", card.name).as_bytes());
    for source in kernels::SOURCES {
        hasher.update(source.text.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_string()
}

fn path(key: &str) -> Option<PathBuf> {
    Some(cache::folder()?.join("trials").join(format!("{key}.json")))
}
