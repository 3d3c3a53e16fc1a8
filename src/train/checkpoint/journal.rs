//! The step journal: a thread writes the state behind the steps into `OUT/journal/checkpoint-{step}`, so that a process
//! that is killed loses seconds and not the steps since its last checkpoint. It is no adapter for other programs (only
//! the trained values are there, not PEFT's configuration). A run that ends with a checkpoint as new removes it.

use super::write::{fill, keep_newest};
use super::{ADAPTER, Identity, JOURNAL, State, read};
use crate::format::safetensors::{self, Spec};
use crate::format::{FormatError, atomic};
use crate::model::layout::{Entry, Layout};
use crate::numeric::dtype::Dtype;
use crate::train::optim::AdamW;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Largest parameters, moments, residuals, velocity and parameters before together, in bytes: they are copied for the thread.
const LARGEST: usize = 64 << 20;
/// Bytes per second of wall time, so that a disk of flash memory lives long: 170 GB a day.
const RATE: f64 = 2e6;
/// The time between two writes is at least this many times that of a write.
const PAUSE: u32 = 50;

/// A thread that writes states.
pub struct Journal<'scope> {
    folder: PathBuf,
    states: Sender<State>,
    next: Arc<Mutex<Next>>,
    thread: ScopedJoinHandle<'scope, ()>,
}

/// When the next state is taken.
enum Next {
    At(Instant),
    /// Not while one is written.
    Later,
    /// Never: the last one could not be written, for this reason.
    Failed(FormatError),
    Never,
}

fn lock(next: &Mutex<Next>) -> MutexGuard<'_, Next> {
    next.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'scope> Journal<'scope> {
    /// A journal in the folder `output` of a run; None where the state is too large for one.
    pub fn start<'env>(
        scope: &'scope Scope<'scope, 'env>,
        (output, identity): (&Path, &Identity),
        (layout, state): (&Layout, &State),
        steps_per_epoch: u64,
    ) -> Option<Self> {
        let AdamW { exp_avg, exp_avg_sq, residual, .. } = &state.optimizer;
        let copied =
            [&state.parameters, exp_avg, exp_avg_sq, residual, &state.velocity, &state.before].map(Vec::len);
        if size_of::<f32>() * copied.iter().sum::<usize>() > LARGEST {
            return None;
        }
        let (folder, next) = (output.join(JOURNAL), Arc::new(Mutex::new(Next::At(Instant::now()))));
        let writer = Writer {
            folder: folder.clone(),
            identity: identity.clone(),
            layout: layout.clone(),
            steps_per_epoch,
            next: Arc::clone(&next),
        };
        let (states, taken) = channel();
        let thread = std::thread::Builder::new().name("journal".into());
        let thread = thread.spawn_scoped(scope, move || writer.write_all(&taken)).ok()?;
        Some(Journal { folder, states, next, thread })
    }

    /// Whether it is time to write a state. An error says why the one before could not be written, once: then nothing is
    /// written any more.
    pub fn is_due(&self) -> Result<bool, FormatError> {
        let mut next = lock(&self.next);
        match std::mem::replace(&mut *next, Next::Never) {
            Next::Failed(error) => return Err(error),
            other => *next = other,
        }
        Ok(matches!(*next, Next::At(time) if time <= Instant::now()))
    }

    /// Writes a state.
    pub fn take(&self, state: State) {
        *lock(&self.next) = Next::Later;
        // Without the thread nothing is written.
        let _ = self.states.send(state);
    }

    /// Ends the thread. With the step of a checkpoint that is not older, all states are removed.
    pub fn end(self, saved: Option<u64>) {
        drop(self.states);
        // A panic of the thread costs the journal only.
        let _ = self.thread.join();
        let states = read::list(&self.folder);
        if saved.is_some_and(|saved| states.iter().all(|(step, _)| *step <= saved)) {
            // What remains wastes disk space only. Files of others stay, and then the folder too.
            let _ = read::recover_here(&self.folder);
            states.iter().for_each(|(_, path)| drop(fs::remove_dir_all(path)));
            let _ = fs::remove_dir(&self.folder);
        }
    }
}

/// What the thread has.
struct Writer {
    folder: PathBuf,
    identity: Identity,
    layout: Layout,
    steps_per_epoch: u64,
    next: Arc<Mutex<Next>>,
}

impl Writer {
    fn write_all(&self, states: &Receiver<State>) {
        while let Ok(state) = states.recv() {
            let began = Instant::now();
            let written = self.write(&state);
            *lock(&self.next) = match written {
                Ok(bytes) => {
                    let pause = Duration::from_secs_f64(bytes as f64 / RATE).max(PAUSE * began.elapsed());
                    Next::At(Instant::now() + pause)
                }
                Err(error) => Next::Failed(error),
            };
        }
    }

    /// Returns the number of bytes.
    fn write(&self, state: &State) -> Result<u64, FormatError> {
        // Not the run's folder, which may have been removed meanwhile.
        match fs::create_dir(&self.folder) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(FormatError::io(&self.folder, e));
            }
            _ => {}
        }
        // A failed clean-up wastes disk space only.
        let _ = read::recover_here(&self.folder);
        let path = self.folder.join(format!("checkpoint-{}", state.step));
        let adapter = |dir: &Path, flat: &[f32]| self.parameters(&dir.join(ADAPTER), flat);
        atomic::write_dir(&path, |dir| fill(dir, (state, self.steps_per_epoch), &self.identity, &adapter))?;
        keep_newest(&self.folder, (1, None), &path);
        let files = fs::read_dir(&path).into_iter().flatten().flatten();
        Ok(files.filter_map(|file| file.metadata().ok()).map(|about| about.len()).sum())
    }

    /// The trained values under the names of the layout.
    fn parameters(&self, path: &Path, flat: &[f32]) -> Result<(), FormatError> {
        let entries = self.layout.entries();
        let bytes: Vec<_> = entries.iter().map(|e| Dtype::F32.bytes_of(&flat[e.range()])).collect();
        let spec = |e: &Entry| Spec { name: e.name.clone(), dtype: Dtype::F32, shape: vec![e.rows, e.cols] };
        let tensors: Vec<_> = entries.iter().zip(&bytes).map(|(e, bytes)| (spec(e), &bytes[..])).collect();
        safetensors::write(path, &tensors)
    }
}
