//! The conditions that a seed draws: the workers, the network, and the faults with their times.

use super::network::Weather;
use super::truth::Plan;
use super::worker::{Cheats, Forgery, Ill};
use super::{Draws, MILLI, Micros, SECOND};

/// Whether the other side notices the end of a process at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum End {
    Noticed,
    /// Its host fails with it.
    Silent,
}

/// A fault, or a worker that joins or leaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Blow {
    /// The process is killed and restarted after `back`, if at all; its host may fail with it.
    Kill { worker: usize, back: Option<Micros>, end: End },
    /// The process stops for a while.
    Freeze { worker: usize, length: Micros },
    /// SIGTERM; the worker returns after `back`.
    Leave { worker: usize, back: Micros },
    /// Its connection is reset; it dials again at once.
    Reset { worker: usize },
    /// Its connection passes no bytes any more, in either direction.
    Cut { worker: usize },
    /// A fault of a device.
    Ill { worker: usize, device: usize, ill: Ill },
    /// Its copy of the parameters is damaged.
    Damage { worker: usize },
    /// Its devices become slower or faster.
    Pace { worker: usize, times: f64 },
    /// The coordinator is killed and restarted.
    Restart { back: Micros },
    /// A peer with the token sends invalid messages.
    Nonsense,
}

/// The conditions of one run.
#[derive(Debug, Clone)]
pub struct Fate {
    pub seed: u64,
    pub weather: Weather,
    /// Devices of each worker: class and microseconds per token.
    pub workers: Vec<Vec<(String, f64)>>,
    /// When each worker first dials.
    pub dials: Vec<Micros>,
    pub expect: usize,
    pub blows: Vec<(Micros, Blow)>,
    pub bad: Option<(u64, usize)>,
    /// Longest time for which a checkpoint keeps the driver from its events.
    pub busy: Micros,
    pub steps: u64,
    pub items: usize,
    /// Whether workers add denied gradients; then the oracles must fail.
    pub cheats: Cheats,
    /// The share of microbatches that is computed again.
    pub verify: f64,
    /// A worker whose results are wrong.
    pub liar: Option<(usize, Forgery)>,
    /// Number of steps by which gradients are delayed.
    pub delay: u64,
}

impl Fate {
    pub fn of(seed: u64) -> Self {
        let mut draws = Draws::new(seed, 1);
        let d = &mut draws;
        let rough = d.chance(0.6);
        let part = |d: &mut Draws, most: f64| if rough { d.unit() * most } else { 0.0 };
        let weather = Weather {
            delay: [50, 500, 5 * MILLI, 40 * MILLI][d.between(0, 4) as usize],
            bulk: 60 * MILLI,
            jitter: if rough { 1.0 } else { 0.2 },
            lost: part(d, 0.2),
            twice: part(d, 0.3),
            late: part(d, 0.3),
        };
        let count = d.between(1, 7) as usize;
        let workers: Vec<_> = (0..count).map(|_| devices(d)).collect();
        let late = d.chance(0.3);
        let dials = (0..count)
            .map(|w| if w > 0 && late { d.between(0, 5 * SECOND) } else { d.between(0, 50 * MILLI) });
        let dials = dials.collect();
        let steps = d.between(2, 7);
        let items = d.between(1, 25) as usize;
        let expect = 1 + if d.chance(0.3) { d.between(0, count as u64) as usize } else { 0 };
        // Never in the last step, which may be a short one.
        let bad = d.chance(0.04).then(|| (1 + d.between(0, steps - 1), d.between(0, items as u64) as usize));
        let mut fate = Fate {
            seed,
            weather,
            workers,
            dials,
            expect,
            blows: vec![],
            bad,
            busy: 2 * SECOND,
            steps,
            items,
            cheats: Cheats::No,
            verify: 0.0,
            liar: None,
            delay: 0,
        };
        let calm = d.chance(0.15);
        let blows = if calm { 0 } else { d.between(1, 8) };
        let length = fate.ideal() + SECOND;
        for _ in 0..blows {
            let at = d.between(0, length);
            let blow = fate.blow(d);
            fate.blows.push((at, blow));
        }
        fate
    }

    /// The same with checked work: every worker has devices of one class, and returns.
    pub fn checked(seed: u64, verify: f64) -> Self {
        let mut d = Draws::new(seed, 4);
        let mut fate = Fate { verify, ..Fate::of(seed) };
        while fate.workers.len() < 3 {
            fate.workers.push(devices(&mut d));
            fate.dials.push(d.between(0, 50 * MILLI));
        }
        fate.workers.iter_mut().flatten().for_each(|(class, _)| *class = "cpu".into());
        let forgeries = [
            Forgery::Scaled,
            Forgery::Stale,
            Forgery::Random,
            Forgery::Flipped,
            Forgery::Bit,
            Forgery::AsChecker,
        ];
        fate.liar = d.chance(0.8).then(|| {
            (
                d.between(0, fate.workers.len() as u64) as usize,
                forgeries[d.between(0, forgeries.len() as u64) as usize],
            )
        });
        fate.blows.retain(|(_, blow)| !matches!(blow, Blow::Ill { ill: Ill::Error(_) | Ill::Bad, .. }));
        for (_, blow) in &mut fate.blows {
            if let Blow::Kill { back, .. } = blow {
                back.get_or_insert(2 * SECOND);
            }
        }
        fate
    }

    /// Whether a forgery may enter a sum, because not everything is checked.
    pub fn tolerates(&self) -> bool {
        self.verify < 1.0 && self.liar.is_some()
    }

    pub fn plan(&self) -> Plan {
        let Fate { seed, steps, items, bad, delay, .. } = *self;
        Plan { seed, steps, items, evals: 5, prompts: 2, bad, delay }
    }

    /// Time that all devices together need for the training alone.
    pub fn ideal(&self) -> Micros {
        let rate: f64 = self.workers.iter().flatten().map(|(_, each)| 1.0 / each).sum();
        (3.0 * self.plan().tokens() as f64 / rate) as Micros
    }

    /// Upper bound of the run's time: three times that of the slowest device alone, and for every fault the time to
    /// notice it and to wait for workers that return.
    pub fn bound(&self) -> Micros {
        let slowest = self.workers.iter().flatten().map(|(_, each)| *each).fold(0.0, f64::max);
        let pace = |(_, blow): &(Micros, Blow)| match blow {
            Blow::Pace { times, .. } => times.max(1.0),
            Blow::Ill { ill: Ill::Error(_), .. } => 4.0,
            _ => 1.0,
        };
        let alone =
            3.0 * self.plan().tokens() as f64 * slowest * self.blows.iter().map(pace).product::<f64>();
        3 * alone as Micros + (self.blows.len() as u64 + 2) * 60 * SECOND
    }

    fn blow(&self, d: &mut Draws) -> Blow {
        let worker = d.between(0, self.workers.len() as u64) as usize;
        let device = d.between(0, self.workers[worker].len() as u64) as usize;
        // The first worker always returns, so that the run can end; all do if the run waits for all of them at its
        // start.
        let needed = worker == 0 || self.expect > 1;
        let back = Some(d.between(100 * MILLI, 8 * SECOND)).filter(|_| needed || d.chance(0.6));
        match d.between(0, 14) {
            0 | 1 => Blow::Kill { worker, back, end: if d.chance(0.3) { End::Silent } else { End::Noticed } },
            2 | 3 => Blow::Freeze { worker, length: d.between(50 * MILLI, 10 * SECOND) },
            4 => Blow::Leave { worker, back: back.unwrap_or(5 * SECOND) },
            5 | 6 => Blow::Reset { worker },
            7 => Blow::Cut { worker },
            8 => Blow::Ill { worker, device, ill: Ill::Error(Some(4.0).filter(|_| needed || d.chance(0.5))) },
            9 if d.chance(0.2) => Blow::Ill { worker, device, ill: Ill::Bad },
            9 | 10 => Blow::Ill { worker, device, ill: Ill::Hang },
            11 if d.chance(0.5) => Blow::Damage { worker },
            11 => Blow::Nonsense,
            12 => Blow::Pace { worker, times: [0.3, 3.0, 8.0][d.between(0, 3) as usize] },
            _ => Blow::Restart { back: d.between(500 * MILLI, 5 * SECOND) },
        }
    }
}

fn devices(d: &mut Draws) -> Vec<(String, f64)> {
    let base = [100.0, 300.0, 1000.0, 4000.0][d.between(0, 4) as usize];
    let class = ["cuda", "cpu"][d.between(0, 2) as usize];
    let count = if d.chance(0.7) { 1 } else { d.between(2, 5) };
    (0..count).map(|_| (class.to_string(), base * (0.8 + 0.4 * d.unit()))).collect()
}
