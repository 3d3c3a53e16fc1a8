//! Lines while a model is fetched from the coordinator.

use crate::support::waiting::{PATIENCE, later};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The counter of bytes that have come, and the number of bytes that are to come from now on.
type Bytes<'a> = (&'a AtomicU64, u64);

/// Awaits `work`. If it takes longer than two seconds, says how much has come, and again after 4, 8, 16 and 32 seconds, then
/// every minute.
pub(super) async fn during<T>(bytes: Bytes<'_>, say: &dyn Fn(&str), work: impl Future<Output = T>) -> T {
    beside(PATIENCE, bytes, say, work).await
}

async fn beside<T>(
    patience: Duration,
    (come, all): Bytes<'_>,
    say: &dyn Fn(&str),
    work: impl Future<Output = T>,
) -> T {
    let (began, mut next) = (Instant::now(), patience);
    let before = come.load(Ordering::Relaxed);
    tokio::pin!(work);
    loop {
        match tokio::time::timeout(next.saturating_sub(began.elapsed()), &mut work).await {
            Ok(done) => return done,
            Err(_) => say(&line(come.load(Ordering::Relaxed) - before, all)),
        }
        next = later(next);
    }
}

/// A file that came with other contents is fetched again, so more may come than there is.
fn line(come: u64, all: u64) -> String {
    let come = come.min(all);
    let percent = (u128::from(come) * 100).checked_div(u128::from(all)).unwrap_or(100);
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    format!("fetched {:.1} of {:.1} MB, {percent} %", megabytes(come), megabytes(all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn long_fetches_are_counted_and_return_their_result() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        // What came before the fetch is not counted.
        let (come, lines) = (AtomicU64::new(77_000_000), RefCell::new(Vec::new()));
        let say = |line: &str| lines.borrow_mut().push(line.to_string());
        let bytes = || (&come, 3_000_000);
        assert_eq!(runtime.block_on(beside(Duration::from_secs(60), bytes(), &say, async { 7 })), 7);
        assert!(lines.borrow().is_empty());
        // It ends once it was mentioned three times; half of it comes between two lines, in the end more than all.
        let work = async {
            for said in 1..4 {
                while lines.borrow().len() < said {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                come.fetch_add(1_600_000, Ordering::Relaxed);
            }
            8
        };
        assert_eq!(runtime.block_on(beside(Duration::from_millis(5), bytes(), &say, work)), 8);
        let want =
            ["fetched 0.0 of 3.0 MB, 0 %", "fetched 1.6 of 3.0 MB, 53 %", "fetched 3.0 of 3.0 MB, 100 %"];
        assert_eq!(lines.into_inner(), want);
        assert_eq!(line(0, 0), "fetched 0.0 of 0.0 MB, 100 %");
    }
}
