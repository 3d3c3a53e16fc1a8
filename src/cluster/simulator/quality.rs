//! Efficiency of the assignment on devices that differ only in speed.

use super::driver::Outcome;
use super::fate::{Blow, Fate};
use super::network::Weather;
use super::worker::Cheats;
use super::world::{Report, Voice, World};
use super::{MILLI, Micros, SECOND};
use crate::cluster::machine::{DeviceReport, Kind, Tally};

/// Workers of one device each, with these speeds in microseconds per token, on a network of this delay.
fn fate(speeds: &[f64], delay: Micros, items: usize) -> Fate {
    let steps = 12;
    Fate {
        seed: 7,
        weather: Weather { delay, bulk: MILLI, jitter: 0.1, ..Weather::default() },
        workers: speeds.iter().map(|&each| vec![("cpu".to_string(), each)]).collect(),
        dials: vec![0; speeds.len()],
        expect: speeds.len(),
        blows: vec![],
        bad: None,
        busy: 0,
        steps,
        items,
        cheats: Cheats::No,
        verify: 0.0,
        liar: None,
        delay: 0,
    }
}

struct Lived {
    report: Report,
    devices: Vec<DeviceReport>,
    train: Vec<Tally>,
}

fn live(fate: &Fate) -> Lived {
    let mut report = World::new(fate, Voice::Silent).run(fate.bound());
    assert!(matches!(report.outcome, Outcome::Done(_)), "{:?}", report.outcome);
    let devices = report.driver.take().expect("it runs to the end").machine.devices();
    let train = report.tallies.iter().filter(|(k, _)| *k == Kind::Train).map(|(_, t)| t.clone()).collect();
    Lived { report, devices, train }
}

impl Lived {
    /// Rounds per second.
    fn rate(&self) -> f64 {
        1.0 / self.train.iter().map(|t| (t.computing + t.exposed).as_secs_f64()).sum::<f64>()
    }

    /// Throughput relative to the sum of each worker's throughput alone.
    fn used(&self, all: &Fate) -> f64 {
        let alone = |w: &Vec<(String, f64)>| {
            live(&Fate { workers: vec![w.clone()], dials: vec![0], expect: 1, ..all.clone() }).rate()
        };
        self.rate() / all.workers.iter().map(alone).sum::<f64>()
    }

    fn of(&self, worker: usize) -> impl Iterator<Item = &DeviceReport> {
        self.devices.iter().filter(move |d| d.place.member == format!("w{worker}"))
    }

    fn share(&self, worker: usize) -> f64 {
        let tokens = |d: &DeviceReport| d.tokens as f64;
        self.of(worker).map(tokens).sum::<f64>() / self.devices.iter().map(tokens).sum::<f64>()
    }
}

#[test]
fn card_four_times_slower_gets_a_fifth_of_the_work() {
    let fate = fate(&[100.0, 400.0], 500, 32);
    let lived = live(&fate);
    let (used, share) = (lived.used(&fate), lived.share(1));
    // An equal split waits for the slow device: 2 * 0.2 of the sum.
    println!(
        "throughput {used:.3} of the sum (an equal split: at most 0.40), the slow one's share {share:.3}"
    );
    assert!(used >= 0.90, "throughput is {used:.3} of the sum");
    assert!((share / 0.2 - 1.0).abs() <= 0.2, "the slow one's share is {share:.3}");
}

#[test]
fn work_is_shared_in_proportion_to_speed() {
    let cases: [(&[f64], f64); 4] = [
        (&[100.0; 3], 0.90),
        (&[100.0, 200.0, 400.0], 0.90),
        (&[100.0, 100.0, 1600.0], 0.85),
        (&[100.0, 3200.0], 0.85),
    ];
    for (speeds, least) in cases {
        let fate = fate(speeds, 500, 48);
        let used = live(&fate).used(&fate);
        assert!(used >= least, "{speeds:?}: {used:.3} of the sum");
    }
}

#[test]
fn device_never_waits_for_a_round_trip() {
    // A round trip lasts as long as 8 microbatches.
    let fate = fate(&[100.0], 40 * MILLI, 96);
    let lived = live(&fate);
    // Each step has one unavoidable transfer to the worker and one back, and the first step measures.
    let took: f64 = lived.train.iter().skip(1).map(|t| t.computing.as_secs_f64()).sum();
    let ways = 11.0 * 0.16;
    let ideal = fate.ideal() as f64 / 1e6 * 11.0 / 12.0;
    assert!(took <= 1.05 * ideal + ways, "{took:.3} s for {ideal:.3} s of computing");
}

#[test]
fn frozen_worker_costs_a_repeat_and_no_timeout() {
    let mut fate = fate(&[100.0, 100.0], 500, 32);
    fate.blows.push((SECOND, Blow::Freeze { worker: 1, length: 60 * SECOND }));
    let lived = live(&fate);
    let slowest = lived.train.iter().map(|t| t.computing + t.exposed).max().unwrap_or_default();
    assert!(lived.train.iter().map(|t| t.repeats).sum::<u64>() >= 1);
    // Its granted work waits until it is given up, a few seconds; its unfinished lease does not.
    assert!(slowest.as_secs_f64() < 4.0, "{slowest:?}");
    assert!(!lived.report.notes.is_empty());
}

/// A device that was slow for a while and got no work is measured again. One that stays slow costs little, even if
/// no other device may repeat its item, so that the step has to wait for it.
#[test]
fn idle_device_is_measured_again() {
    let mut fate = Fate { steps: 80, ..fate(&[100.0, 100.0], 500, 32) };
    let ideal = fate.ideal();
    fate.blows = [(ideal / 10, 40.0), (ideal / 4, 1.0 / 40.0)].map(|(at, times)| (at, pace(times))).into();
    let lived = live(&fate);
    assert!(lived.share(1) >= 0.3, "after its recovery it has {:.3} of the whole run", lived.share(1));

    // The second and third are so slow that not even the smallest item falls to them.
    for (class, each) in [("cpu", 6400.0), ("cpu", 51_200.0), ("gpu", 51_200.0)] {
        let mut slow = Fate { steps: 200, ..self::fate(&[100.0, each], 500, 16) };
        slow.workers[1][0].0 = class.into();
        let (lived, alone) = (
            live(&slow),
            live(&Fate { workers: slow.workers[..1].to_vec(), dials: vec![0], expect: 1, ..slow.clone() }),
        );
        let rate = lived.rate() / alone.rate();
        let did: u64 = lived.of(1).map(|d| d.microbatches).sum();
        let happened = lived.report.happened;
        println!(
            "{class}, {each}: {rate:.3} of what the fast one does alone, {did} microbatches, {happened} events"
        );
        match class {
            "cpu" => assert!(rate >= 0.97, "{rate:.3} of what the fast one does alone"),
            // Once before its speed is known, and after 16, 32 and 64 idle rounds.
            _ => assert!((2..=4).contains(&did), "{did} microbatches that everybody waited for"),
        }
    }
}

/// Sums and parameters travel while the next step is computed, but for every third step, which an evaluation follows.
#[test]
fn delayed_steps_hide_the_network() {
    let slow = fate(&[100.0, 100.0], 20 * MILLI, 16);
    let wall =
        |fate: &Fate| live(fate).train.iter().map(|t| (t.computing + t.exposed).as_secs_f64()).sum::<f64>();
    let (sync, delayed) = (wall(&slow), wall(&Fate { delay: 1, ..slow.clone() }));
    println!("{sync:.3} s of training, {delayed:.3} s with delayed steps");
    assert!(delayed < 0.75 * sync, "{delayed:.3} of {sync:.3} s");
}

fn pace(times: f64) -> Blow {
    Blow::Pace { worker: 1, times }
}
