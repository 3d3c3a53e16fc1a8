//! Lines on stderr while long work goes on, so that it is not taken for a program that hangs.

use super::stderr::say;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Does `work`. If it takes longer than two seconds, `what` is printed, and again with the time so far after 4, 8, 16
/// and 32 seconds, then every minute.
pub fn during<T>(what: &str, work: impl FnOnce() -> T) -> T {
    if QUIET.load(Ordering::Relaxed) {
        return work();
    }
    beside(PATIENCE, work, |so_far| match so_far {
        None => say!("{what} ..."),
        Some(seconds) => say!("{what}: {seconds} s so far"),
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
        assert_eq!(during("nothing", || 7), 7);
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
}
