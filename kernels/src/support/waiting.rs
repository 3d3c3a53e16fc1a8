//! Lines on stderr while long work goes on, so that it is not taken for a program that hangs.

use super::stderr::say;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time after which the first line is printed. Shorter work is not mentioned.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Most time between two lines.
const LONGEST: Duration = Duration::from_secs(60);

static QUIET: AtomicBool = AtomicBool::new(false);

/// No lines from now on: the program was started with --quiet.
pub fn silence() {
    QUIET.store(true, Ordering::Relaxed);
}

/// How far some work is. The threads that do it count, and its lines say the sum.
pub struct Progress {
    done: AtomicU64,
    /// 0 if it is not known.
    of: AtomicU64,
    /// What is counted, where the end is not known.
    unit: &'static str,
}

/// Of the layers of a model.
pub static LOADING: Progress = Progress::of("layers");
/// Of the bytes of a model.
pub static HASHING: Progress = Progress::of("bytes");
/// Of rows.
pub static READING: Progress = Progress::of("rows");
/// Of the tensors of an export, which are written and read back.
pub static WRITING: Progress = Progress::of("tensors");

impl Progress {
    const fn of(unit: &'static str) -> Self {
        Progress { done: AtomicU64::new(0), of: AtomicU64::new(0), unit }
    }

    /// From now on this much is to do, 0 if it is not known, and nothing is done.
    pub fn begin(&self, of: u64) {
        self.of.store(of, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }

    /// This much more is done.
    pub fn add(&self, done: u64) {
        self.done.fetch_add(done, Ordering::Relaxed);
    }

    /// "40 %, " or "7000 rows, "; nothing before the first step.
    fn text(&self) -> String {
        match (self.done.load(Ordering::Relaxed), self.of.load(Ordering::Relaxed)) {
            (0, _) => String::new(),
            (done, 0) => format!("{done} {}, ", self.unit),
            // The end of the work is not its last step.
            (done, of) => format!("{} %, ", (100 * done / of).min(99)),
        }
    }
}

/// Does `work`. If it takes longer than two seconds, `what` is printed, and again with how far it is and the time so far
/// after 4, 8, 16 and 32 seconds, then every minute.
pub fn during<T>(what: &str, progress: &Progress, work: impl FnOnce() -> T) -> T {
    if QUIET.load(Ordering::Relaxed) {
        return work();
    }
    beside(PATIENCE, work, |so_far| match so_far {
        None => say!("{what} ..."),
        Some(seconds) => say!("{what}: {}{seconds} s so far", progress.text()),
    })
}

/// When the next line is due after one at `at`. Both are times since the work began.
pub fn later(at: Duration) -> Duration {
    at + at.min(LONGEST)
}

/// Does `work`, and calls `line` while it goes on: after `patience`, then with the seconds so far.
fn beside<T>(patience: Duration, work: impl FnOnce() -> T, line: impl Fn(Option<u64>) + Send) -> T {
    thread::scope(|scope| {
        // Dropped at the end of the work, also when it panics.
        let (_ends, end) = channel::<()>();
        // Without a thread the work goes on without lines.
        let _ = thread::Builder::new().spawn_scoped(scope, move || watch(&end, patience, line));
        work()
    })
}

/// Calls `line` at these times until `end` is closed.
fn watch(end: &Receiver<()>, patience: Duration, line: impl Fn(Option<u64>)) {
    let (began, mut next, mut is_first) = (Instant::now(), patience, true);
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(next.saturating_sub(began.elapsed())) {
        line((!is_first).then(|| began.elapsed().as_secs()));
        next = later(next);
        is_first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn only_long_work_is_mentioned_and_its_result_is_returned() {
        assert_eq!(during("nothing", &READING, || 7), 7);
        let seen = Mutex::new(Vec::new());
        let line = |so_far| seen.lock().unwrap().push(so_far);
        assert_eq!(beside(Duration::from_secs(60), || 7, line), 7);
        assert!(seen.lock().unwrap().is_empty());
        // The work ends once it was mentioned twice.
        let work = || {
            while seen.lock().unwrap().len() < 2 {
                thread::sleep(Duration::from_millis(1));
            }
            8
        };
        assert_eq!(beside(Duration::from_millis(5), work, line), 8);
        let seen = seen.lock().unwrap();
        assert!(seen[0].is_none() && seen[1].is_some(), "{seen:?}");
    }

    #[test]
    fn progress_is_a_share_or_a_count() {
        let progress = Progress::of("rows");
        progress.begin(0);
        assert_eq!(progress.text(), "");
        progress.add(3);
        progress.add(4);
        assert_eq!(progress.text(), "7 rows, ");
        progress.begin(8);
        assert_eq!(progress.text(), "");
        progress.add(3);
        assert_eq!(progress.text(), "37 %, ");
        progress.add(5);
        assert_eq!(progress.text(), "99 %, ");
    }
}
