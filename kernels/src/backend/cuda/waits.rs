//! Waits for the card, each with a deadline: the driver's own waits never return after a kernel that does not end. A
//! card that failed or did not answer is lost for this process: the driver returns errors from then on, and its calls
//! may block.

use super::graphs;
use cudarc::driver::sys::{self, CUresult};
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The variable with the seconds after which a card without an answer is lost.
pub const WAIT: &str = "FINETUNE_CUDA_WAIT";
/// Its default.
const SECONDS: u32 = 120;
/// A wait may also last this many times the longest one so far.
const TIMES: u32 = 20;
/// Until then a wait asks without a pause: most reads are short, and trials are timed by it.
const SPIN: Duration = Duration::from_millis(2);
/// The longest pause, and its part of the time so far.
const PAUSE: (Duration, u32) = (Duration::from_millis(1), 64);

/// Why the card is not used further.
pub(super) enum Stop {
    /// A call returned this.
    Code(CUresult),
    /// It did not answer for so long.
    Silent(Duration),
}

impl Stop {
    /// Whether no later call can succeed.
    pub fn lasts(&self) -> bool {
        match self {
            Stop::Code(code) => graphs::lasts(*code),
            Stop::Silent(_) => true,
        }
    }
}

impl From<CUresult> for Stop {
    fn from(code: CUresult) -> Self {
        Stop::Code(code)
    }
}

impl Display for Stop {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        match self {
            Stop::Code(code) => write!(f, "{code:?}"),
            Stop::Silent(limit) => write!(f, "no answer within {} s", limit.as_secs()),
        }
    }
}

/// The seconds that a wait may last where none was longer.
fn patience() -> Duration {
    static READ: OnceLock<u32> = OnceLock::new();
    let read = || typed().ok().flatten().unwrap_or(SECONDS);
    Duration::from_secs((*READ.get_or_init(read)).into())
}

/// The longest wait inside a trial. The whole trial, which also compiles kernels, may take three times as long.
pub fn patience_in_trials() -> Duration {
    patience().min(Duration::from_secs(20))
}

/// What is wrong with the variable, if it is no whole number of seconds.
pub fn refused_wait() -> Option<String> {
    let text = typed().err()?;
    Some(format!("{WAIT}={text}: not a whole number of seconds from 1 on: correct it, or unset it"))
}

/// The seconds in the variable; the error is its text.
fn typed() -> Result<Option<u32>, String> {
    let Some(text) = std::env::var_os(WAIT) else { return Ok(None) };
    let text = text.to_string_lossy().into_owned();
    text.parse().ok().filter(|seconds| *seconds > 0).map(Some).ok_or(text)
}

/// The waits of a device.
#[derive(Default)]
pub(super) struct Waits {
    longest: Duration,
}

impl Waits {
    /// Waits until all work of the stream is done.
    pub fn stream(&mut self, stream: sys::CUstream) -> Result<(), Stop> {
        // SAFETY: the caller's stream lives.
        self.until(|| unsafe { sys::cuStreamQuery(stream) })
    }

    /// Waits until the work before the event is done.
    pub fn event(&mut self, event: sys::CUevent) -> Result<(), Stop> {
        // SAFETY: the caller's event lives.
        self.until(|| unsafe { sys::cuEventQuery(event) })
    }

    fn until(&mut self, ask: impl Fn() -> CUresult) -> Result<(), Stop> {
        let (began, limit) = (Instant::now(), patience().max(self.longest * TIMES));
        loop {
            match ask() {
                CUresult::CUDA_ERROR_NOT_READY => {}
                CUresult::CUDA_SUCCESS => {
                    self.longest = self.longest.max(began.elapsed());
                    return Ok(());
                }
                code => return Err(Stop::Code(code)),
            }
            match began.elapsed() {
                waited if waited > limit => return Err(Stop::Silent(limit)),
                waited if waited > SPIN => std::thread::sleep((waited / PAUSE.1).min(PAUSE.0)),
                _ => std::thread::yield_now(),
            }
        }
    }
}

/// Lost cards, and why.
static LOST: Mutex<BTreeMap<sys::CUdevice, String>> = Mutex::new(BTreeMap::new());

/// Why a card is lost, if it is.
pub(super) fn lost(device: sys::CUdevice) -> Option<String> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner).get(&device).cloned()
}

/// The card is lost; the first reason stays.
pub(super) fn lose(device: sys::CUdevice, why: &str) {
    let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    lost.entry(device).or_insert_with(|| why.into());
}
