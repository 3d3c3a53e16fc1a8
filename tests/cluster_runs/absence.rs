//! Workers and coordinators that are absent or duplicated: the run waits, ends in a state that can be resumed, or
//! continues with the right coordinator, and no byte changes.

use crate::fleet::{Fleet, RUN};
use rustix::process::Signal;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Waits until the process has printed `part`.
#[track_caller]
fn until_said(fleet: &Fleet, name: &str, part: &str) {
    let began = Instant::now();
    while !fleet.said(name).contains(part) {
        assert!(began.elapsed() < Duration::from_secs(90), "{name} does not say {part:?}\n{}", fleet.all());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn run_paused_without_workers_continues_to_the_same_bytes() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2 --min-workers 2"));
    fleet.faulty("stays", "--threads 1", "slow=6");
    fleet.faulty("dies", "--threads 1", "slow=6");
    fleet.wait_for_step(2);
    fleet.kill("dies");
    until_said(&fleet, "coordinator", "at least 2 needed");
    // Running computations finish.
    std::thread::sleep(Duration::from_secs(1));
    let step = fleet.steps();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(fleet.steps(), step, "it went on\n{}", fleet.all());
    fleet.worker("comes", "--threads 1");
    fleet.all_end(&["coordinator", "stays", "comes"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn long_pause_is_saved_with_75_and_resumes_to_the_same_bytes() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2 --min-workers 2 --join-timeout 30s"));
    fleet.faulty("stays", "--threads 1", "slow=6");
    fleet.faulty("dies", "--threads 1", "slow=6");
    fleet.wait_for_step(2);
    fleet.kill("dies");
    fleet.all_end(&["coordinator"], 75);
    let last = fleet.said("coordinator").lines().last().unwrap_or_default().to_string();
    assert!(last.starts_with("error:") && last.contains("--resume"), "{last}\n{}", fleet.all());
    let saved = fleet.bench.path(&format!("out/checkpoint-{}/trainer_state.json", fleet.steps()));
    assert!(saved.exists(), "{}\n{}", saved.display(), fleet.all());
    fleet.coordinator(&format!("{run} --expect-workers 2 --resume"));
    fleet.worker("comes", "--threads 1");
    fleet.all_end(&["coordinator", "stays", "comes"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

/// An old copy of the run is started in place of the newer one: its workers have met a later epoch and refuse it.
#[test]
fn coordinator_of_an_older_epoch_gets_no_worker() {
    let run = format!("{RUN} --max-steps 9 --save-steps 1");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.faulty("worker", "--threads 1", "slow=8");
    fleet.wait_for_step(2);
    fleet.kill("coordinator");
    let [out, old, newer] = ["out", "old", "newer"].map(|name| fleet.bench.path(name));
    copy(&out, &old);
    for step in [3, 5] {
        fleet.coordinator(&format!("{run} --expect-workers 1 --resume"));
        fleet.wait_for_step(step + 1);
        fleet.kill("coordinator");
    }
    std::fs::rename(&out, &newer).unwrap();
    std::fs::rename(&old, &out).unwrap();
    let steps = fleet.steps();
    fleet.coordinator(&format!("{run} --expect-workers 1 --resume"));
    until_said(&fleet, "coordinator", "of epoch 2, and the run has gone on in epoch 3 elsewhere");
    fleet.kill("coordinator");
    assert!(fleet.steps() <= steps, "it went on\n{}", fleet.all());
    std::fs::rename(&out, &old).unwrap();
    std::fs::rename(&newer, &out).unwrap();
    fleet.coordinator(&format!("{run} --expect-workers 1 --resume"));
    fleet.all_end(&["coordinator", "worker"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

fn copy(from: &Path, to: &Path) {
    let copied = std::process::Command::new("cp").arg("-r").args([from, to]).status().unwrap();
    assert!(copied.success());
}

/// The coordinator was killed after the last step and before its workers received the end.
#[test]
fn finished_coordinator_releases_searching_workers() {
    let run = format!("{RUN} --max-steps 2 --expect-workers 1");
    let mut fleet = Fleet::new();
    fleet.coordinator(&run);
    fleet.worker("worker", "--threads 1");
    fleet.all_end(&["coordinator", "worker"], 0);
    fleet.worker("looks", "--threads 1");
    until_said(&fleet, "looks", "trying again");
    // Until the pauses between its attempts have their greatest length.
    std::thread::sleep(Duration::from_secs(4));
    fleet.coordinator(&format!("{run} --resume"));
    fleet.all_end(&["coordinator", "looks"], 0);
    assert_eq!(fleet.steps(), 2, "{}", fleet.all());
}

/// The state of a [`door`]: what it has seen, and whether it lets bytes through.
#[derive(Default)]
struct Door {
    connected: AtomicBool,
    opened: AtomicBool,
}

/// Accepts connections, connects each to `to` at once, and forwards bytes once it is opened.
fn door(to: String, door: Arc<Door>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for here in listener.incoming().flatten() {
            let Ok(there) = TcpStream::connect(&to) else { continue };
            door.connected.store(true, Ordering::Relaxed);
            while !door.opened.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            for (mut from, mut into) in [(&here, &there), (&there, &here)]
                .map(|(from, into)| (from.try_clone().unwrap(), into.try_clone().unwrap()))
            {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut into);
                    let _ = into.shutdown(Shutdown::Write);
                });
            }
        }
    });
    at
}

/// The late worker has connected, and not sent its greeting yet, when the run ends.
#[test]
fn worker_that_connects_last_receives_the_end() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 8 --expect-workers 1"));
    fleet.faulty("worker", "--threads 1", "slow=6");
    let held = Arc::new(Door::default());
    let at = door(fleet.at().to_string(), held.clone());
    fleet.wait_for_step(7);
    fleet.signal("worker", Signal::STOP);
    fleet.seeker("late", &at, "4s");
    while !held.connected.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
    fleet.signal("worker", Signal::CONT);
    // The other worker has received the end, so nothing else delays the coordinator.
    fleet.all_end(&["worker"], 0);
    std::thread::sleep(Duration::from_millis(150));
    held.opened.store(true, Ordering::Relaxed);
    fleet.all_end(&["coordinator", "late"], 0);
}

#[test]
fn resumed_frozen_worker_rejoins() {
    let run = format!("{RUN} --max-steps 8");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.faulty("slow", "--threads 1", "slow=500"); // so that the run does not end first
    fleet.worker("frozen", "--threads 1");
    fleet.wait_for_step(1);
    fleet.signal("frozen", Signal::STOP);
    until_said(&fleet, "coordinator", "nothing was heard");
    fleet.signal("frozen", Signal::CONT);
    fleet.all_end(&["coordinator", "slow", "frozen"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let text = String::from_utf8(fleet.bench.read("out/metrics.jsonl")).unwrap();
    assert!(text.matches("\"joined\"").count() >= 3, "it did not come back\n{}", fleet.all());
}

#[test]
fn worker_killed_within_a_microbatch_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.faulty("stays", "--threads 1", "slow=8"); // so that some work is left for the other
    fleet.faulty("dies", "--threads 1", "die@3");
    fleet.all_end(&["coordinator", "stays"], 0);
    assert_ne!(fleet.end("dies"), Some(0));
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

/// The coordinator decides all options of a run, including those for the files that it writes.
#[test]
fn worker_with_an_option_of_the_run_is_refused_by_name() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 3 --save-steps 2 --expect-workers 1"));
    fleet.worker("other", "--threads 1 --save-steps 7");
    fleet.all_end(&["other"], 78);
    assert!(fleet.said("other").contains("--save-steps 7, the run has 2"), "{}", fleet.all());
    fleet.worker("same", "--threads 1 --save-steps 2");
    fleet.all_end(&["coordinator", "same"], 0);
}
