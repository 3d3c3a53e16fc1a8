//! Lines on stderr while long work goes on, so that it is not taken for a program that hangs.

use super::stderr::say;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Shorter work is not mentioned.
const PATIENCE: Duration = Duration::from_secs(2);
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
    thread::scope(|scope| {
        // Dropped at the end of the work, also when it panics.
        let (_ends, end) = channel::<()>();
        // Without a thread the work goes on without lines.
        let _ = thread::Builder::new().spawn_scoped(scope, move || {
            watch(&end, |so_far| match so_far {
                None => say!("{what} ..."),
                Some(seconds) => say!("{what}: {seconds} s so far"),
            })
        });
        work()
    })
}

/// Calls `line` at these times until `end` is closed.
fn watch(end: &Receiver<()>, line: impl Fn(Option<u64>)) {
    let (began, mut next, mut is_first) = (Instant::now(), PATIENCE, true);
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(next.saturating_sub(began.elapsed())) {
        line((!is_first).then(|| began.elapsed().as_secs()));
        next += next.min(LONGEST);
        is_first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn only_long_work_is_mentioned_and_its_result_is_returned() {
        assert_eq!(during("nothing", || 7), 7);
        let (ends, end) = channel();
        let seen = RefCell::new(Vec::new());
        thread::spawn(move || {
            thread::sleep(PATIENCE * 3 - Duration::from_millis(500));
            drop(ends);
        });
        watch(&end, |so_far| seen.borrow_mut().push(so_far));
        assert_eq!(*seen.borrow(), [None, Some(4)]);
        let (ends, end) = channel();
        drop(ends);
        watch(&end, |_| panic!("the work had ended"));
    }
}
