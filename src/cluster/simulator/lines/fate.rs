//! The conditions that a seed draws: the workers with their rooms, the network, and the faults with their times.

use super::super::network::Weather;
use super::super::truth::{Plan, WIDTH};
use super::super::worker::Cheats;
use super::super::{Draws, MILLI, Micros, SECOND};
use crate::cluster::coordinator::Division;
use crate::cluster::message::{Capacity, Needs};

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Blow {
    /// The process is killed and restarted after `back`. A silent end is noticed after the time limit.
    Kill { host: usize, back: Micros, silent: bool },
    /// The process stops for a while.
    Freeze { host: usize, length: Micros },
    /// What it sends to a neighbour does not arrive any more, while all other directions work.
    Drop { host: usize, upwards: bool },
    /// Its device fails in the next pass.
    Ill { host: usize },
    /// Its copy of the parameters is damaged.
    Damage { host: usize },
    /// The coordinator is killed and restarted.
    Restart { back: Micros },
}

/// The conditions of one run.
#[derive(Debug, Clone)]
pub struct Fate {
    pub seed: u64,
    pub weather: Weather,
    pub division: Division,
    /// What each worker reports.
    pub capacities: Vec<Capacity>,
    /// When each worker first dials.
    pub dials: Vec<Micros>,
    pub blows: Vec<(Micros, Blow)>,
    pub bad: Option<(u64, usize)>,
    pub steps: u64,
    pub items: usize,
    /// Whether seats add denied gradients; then the oracles must fail.
    pub cheats: Cheats,
    /// Whether hidden states arrive wrong; then the oracles must fail.
    pub mixes: bool,
}

impl Fate {
    pub fn of(seed: u64) -> Self {
        let mut draws = Draws::new(seed, 11);
        let d = &mut draws;
        let seats = d.between(2, WIDTH as u64 + 1) as usize;
        let hosts = seats + d.between(0, 2 * seats as u64) as usize;
        let rough = d.chance(0.5);
        let weather = Weather {
            delay: [50, 500, 5 * MILLI, 40 * MILLI][d.between(0, 4) as usize],
            jitter: if rough { 1.0 } else { 0.2 },
            twice: if d.chance(0.3) { 0.05 } else { 0.0 },
            ..Weather::default()
        };
        let division = match d.between(0, 3) {
            0 => Division::Auto(seats),
            1 => {
                Division::Layers((0..seats).map(|at| (at + 1) * WIDTH / seats - at * WIDTH / seats).collect())
            }
            _ => Division::Seats(seats),
        };
        let capacities = (0..hosts).map(|_| capacity(d, seats)).collect();
        let dials = (0..hosts).map(|_| d.between(0, 2 * SECOND)).collect();
        let (steps, items) = (d.between(2, 6), d.between(1, 25) as usize);
        let bad = d.chance(0.04).then(|| (1 + d.between(0, steps - 1), d.between(0, items as u64) as usize));
        let (blows, cheats) = (vec![], Cheats::No);
        let mut fate = Fate {
            seed,
            weather,
            division,
            capacities,
            dials,
            blows,
            bad,
            steps,
            items,
            cheats,
            mixes: false,
        };
        let length = 4 * SECOND + fate.alone() / seats as u64;
        for _ in 0..if d.chance(0.15) { 0 } else { d.between(1, 7) } {
            let (at, blow) = (d.between(0, length), blow(d, hosts));
            fate.blows.push((at, blow));
        }
        fate
    }

    pub fn plan(&self) -> Plan {
        let Fate { seed, steps, items, bad, .. } = *self;
        Plan { seed, steps, items, evals: 5, prompts: 4, bad, delay: 0 }
    }

    /// Microseconds of a token in a layer of a worker.
    pub fn pace(&self, host: usize) -> f64 {
        1e6 * self.capacities[host].seconds.0
    }

    /// Time that the slowest worker needs for the training alone.
    fn alone(&self) -> Micros {
        let slowest = (0..self.capacities.len()).map(|host| self.pace(host)).fold(0.0, f64::max);
        (3.0 * self.plan().tokens() as f64 * WIDTH as f64 * slowest) as Micros
    }

    /// Upper bound of the run's time: for every fault the time to notice it, to form lines again and to repeat a step.
    pub fn bound(&self) -> Micros {
        3 * self.alone() + (self.blows.len() as u64 + 2) * 60 * SECOND
    }
}

/// A device whose room lets every line of enough workers hold the model, but none of them alone.
fn capacity(d: &mut Draws, seats: usize) -> Capacity {
    let room = d.between(WIDTH.div_ceil(seats) as u64, WIDTH as u64);
    let pace = [25e-6, 75e-6, 250e-6][d.between(0, 3) as usize] * (0.8 + 0.4 * d.unit());
    let nothing = Needs { one: 0, more: 0 };
    Capacity {
        seconds: (pace, pace),
        limit: 10 * room,
        layers: vec![10; WIDTH],
        needs: vec![(nothing, nothing); seats],
        streams: (0, 0),
        reading: 0.0,
        link: None,
    }
}

fn blow(d: &mut Draws, hosts: usize) -> Blow {
    let host = d.between(0, hosts as u64) as usize;
    match d.between(0, 10) {
        0..=2 => Blow::Kill { host, back: d.between(100 * MILLI, 8 * SECOND), silent: d.chance(0.3) },
        3 | 4 => Blow::Freeze { host, length: d.between(50 * MILLI, 10 * SECOND) },
        5 | 6 => Blow::Drop { host, upwards: d.chance(0.5) },
        7 => Blow::Ill { host },
        8 => Blow::Damage { host },
        _ => Blow::Restart { back: d.between(500 * MILLI, 5 * SECOND) },
    }
}
