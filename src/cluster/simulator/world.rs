//! Virtual time and its events. Events happen in the order of their times; events of equal time happen in the order
//! in which they were caused, so a seed always gives the same run.

use super::super::machine::{Config, Event, Kind, MemberId, Note, Tally, Verify};
use super::super::message::{Bye, LeaseId, ToCoordinator, ToWorker};
use super::agenda::{Agenda, Next};
use super::driver::{Act, Disk, Driver, Outcome};
use super::fate::{Blow, Fate};
use super::network::{Care, Way, care_down, care_up};
use super::truth::{self, Plan};
use super::worker::{Effect, Engine, Forgery, Ill, Worker};
use super::{Draws, MILLI, Micros, SECOND, SILENCE};
use std::collections::BTreeMap;
use std::time::Duration;

/// Whether a run prints its events.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Voice {
    Silent,
    Aloud,
}

/// An event.
#[derive(Debug, Clone)]
pub(super) enum Happening {
    Dial(usize),
    Accepted(usize),
    Loaded(u64),
    Up(u64, ToCoordinator),
    Down(u64, ToWorker),
    /// The coordinator notices the loss of a connection; `LostDown` is the same for the worker.
    LostUp(u64, &'static str),
    LostDown(u64),
    Finished {
        conn: u64,
        device: usize,
        lease: LeaseId,
    },
    Nudge(u64),
    Blow(Blow),
    Back(usize),
    Boot,
    Nonsense(u64),
}

/// A worker's machine: its devices, and the process if one runs and is connected.
struct Host {
    engines: Vec<Engine>,
    conn: Option<u64>,
    worker: Option<Worker>,
    alive: bool,
    frozen: Micros,
    damaged: bool,
    forgery: Option<Forgery>,
    forgeries: u64,
}

struct Wire {
    /// `None`: a peer that sends invalid messages.
    host: Option<usize>,
    open: bool,
    black: bool,
    up: Way,
    down: Way,
}

/// More events than any run needs; beyond it the run loops without time passing.
const MOST_EVENTS: u64 = 50_000;

/// The result of a run.
pub struct Report {
    pub outcome: Outcome,
    pub time: Micros,
    pub tallies: Vec<(Kind, Tally)>,
    pub notes: Vec<(Micros, Note)>,
    /// Workers that were removed although they did nothing wrong.
    pub wronged: Vec<String>,
    /// For each liar that was taken out, how many of its results were forgeries.
    pub found: Vec<u64>,
    pub happened: u64,
    pub driver: Option<Driver>,
}

pub struct World {
    fate: Fate,
    plan: Plan,
    agenda: Agenda<Happening>,
    driver: Option<Driver>,
    disk: Disk,
    busy: Micros,
    hosts: Vec<Host>,
    wires: BTreeMap<u64, Wire>,
    conns: u64,
    draws: Draws,
    wronged: Vec<String>,
    found: Vec<u64>,
    tallies: Vec<(Kind, Tally)>,
    notes: Vec<(Micros, Note)>,
    voice: Voice,
}

impl World {
    pub fn new(fate: &Fate, voice: Voice) -> Self {
        let host = |devices: &Vec<(String, f64)>| Host {
            engines: devices.iter().map(|(class, each)| Engine::new(class, *each)).collect(),
            conn: None,
            worker: None,
            alive: true,
            frozen: 0,
            damaged: false,
            forgery: None,
            forgeries: 0,
        };
        let mut world = World {
            plan: fate.plan(),
            agenda: Agenda::default(),
            driver: None,
            disk: Disk { epoch: 0, step: 0, parameters: truth::initial(), before: truth::initial() },
            busy: 0,
            hosts: fate.workers.iter().map(host).collect(),
            wires: BTreeMap::new(),
            conns: 0,
            draws: Draws::new(fate.seed, 2),
            wronged: vec![],
            found: vec![],
            tallies: vec![],
            notes: vec![],
            voice,
            fate: fate.clone(),
        };
        fate.liar.into_iter().for_each(|(worker, forgery)| world.hosts[worker].forgery = Some(forgery));
        world.at(0, Happening::Boot);
        fate.dials.iter().enumerate().for_each(|(worker, &at)| world.at(at, Happening::Dial(worker)));
        fate.blows.iter().for_each(|&(at, blow)| world.at(at, Happening::Blow(blow)));
        world
    }

    fn at(&mut self, at: Micros, what: Happening) {
        self.agenda.at(at, what);
    }

    /// Runs until the run has ended or the time is up.
    pub fn run(mut self, bound: Micros) -> Report {
        let mut happened = 0;
        loop {
            let wake = self.driver.as_ref().and_then(|d| d.machine.wake()).map(|w| w.as_micros() as Micros);
            let next = self.agenda.next(wake.map(|w| w.max(self.busy)), bound);
            happened += 1;
            match next.filter(|_| happened <= MOST_EVENTS) {
                None => break,
                Some(Next::Wake) => self.coordinator(|driver, now| driver.event(Event::Time, now)),
                Some(Next::Happens(what)) => self.happens(what),
            }
            if self.driver.as_ref().is_some_and(|d| d.outcome != Outcome::Running) {
                break;
            }
        }
        let outcome = self.driver.as_ref().map_or(Outcome::Running, |d| d.outcome.clone());
        self.keep_records();
        let World { agenda, tallies, notes, wronged, found, driver, .. } = self;
        Report { outcome, time: agenda.now, tallies, notes, wronged, found, happened, driver }
    }

    fn keep_records(&mut self) {
        if let Some(driver) = &mut self.driver {
            self.disk = driver.disk.clone();
            self.tallies.append(&mut driver.tallies);
            self.notes.append(&mut driver.notes);
        }
    }

    fn say(&self, what: &dyn Fn() -> String) {
        if self.voice == Voice::Aloud {
            println!("{:>12.3} ms  {}", self.agenda.now as f64 / 1e3, what());
        }
    }

    fn happens(&mut self, what: Happening) {
        // A frozen host sees no event before it continues.
        let host = match &what {
            Happening::Accepted(host) => Some(*host),
            Happening::Loaded(conn) | Happening::Down(conn, _) | Happening::LostDown(conn) => {
                self.host_of(*conn)
            }
            Happening::Finished { conn, .. } | Happening::Nudge(conn) => self.host_of(*conn),
            _ => None,
        };
        if let Some(until) = host.map(|h| self.hosts[h].frozen).filter(|&f| f > self.agenda.now) {
            return self.agenda.put_off(until, what);
        }
        if matches!(what, Happening::Up(..) | Happening::LostUp(..)) && self.busy > self.agenda.now {
            return self.agenda.put_off(self.busy, what);
        }
        match &what {
            Happening::Nudge(_) | Happening::Finished { .. } => {}
            what => self.say(&|| format!("{what:?}").chars().take(160).collect()),
        }
        match what {
            Happening::Dial(host) => self.dial(host),
            Happening::Accepted(host) => self.accepted(host),
            Happening::Loaded(conn) => {
                if let Some(ready) = self.worker(conn).map(|w| w.ready()) {
                    self.up(conn, ready);
                }
            }
            Happening::Up(conn, message) => {
                if self.wires.get(&conn).is_some_and(|w| w.open && !w.black) {
                    self.coordinator(|driver, now| driver.hears(MemberId(conn), &message, now));
                }
            }
            Happening::Down(conn, message) => {
                if self.wires.get(&conn).is_some_and(|w| !w.black) {
                    self.tell(conn, |worker, now| worker.hears(message, now));
                }
            }
            Happening::LostUp(conn, why) => self.lost_up(conn, why),
            Happening::LostDown(conn) => self.lost_down(conn),
            Happening::Finished { conn, device, lease } => {
                self.tell(conn, |worker, now| worker.finished(device, lease, now));
            }
            Happening::Nudge(conn) => {
                if self.worker(conn).is_some() {
                    self.tell(conn, |worker, now| worker.nudge(now));
                    self.at(self.agenda.now + 500 * MILLI, Happening::Nudge(conn));
                }
            }
            Happening::Blow(blow) => self.blow(blow),
            Happening::Back(host) => {
                self.hosts[host].alive = true;
                self.at(self.agenda.now, Happening::Dial(host));
            }
            Happening::Boot => self.boot(),
            Happening::Nonsense(conn) => self.nonsense(conn),
        }
    }

    fn host_of(&self, conn: u64) -> Option<usize> {
        self.wires.get(&conn)?.host
    }

    /// The worker on this connection, if this is still its connection.
    fn worker(&mut self, conn: u64) -> Option<&mut Worker> {
        let host = self.host_of(conn)?;
        let host = self.hosts.get_mut(host).filter(|h| h.conn == Some(conn))?;
        host.worker.as_mut()
    }

    fn boot(&mut self) {
        let mut key = [self.disk.epoch as u8; 32];
        key[..8].copy_from_slice(&self.fate.seed.to_le_bytes());
        let config = Config {
            expect: if self.disk.epoch == 0 { self.fate.expect } else { 1 },
            min: 1,
            join_timeout: Duration::from_secs(100_000),
            reask: Duration::from_secs(2),
            patience: Duration::from_secs(5),
            recheck: Duration::from_secs(if self.fate.verify > 0.0 { 100 } else { 20 }),
            verify: (self.fate.verify > 0.0).then(|| Verify::new(self.fate.verify, key)),
            delay: self.fate.delay,
            ..Config::default()
        };
        let mut driver = Driver::new(&self.plan, config, self.disk.clone(), self.agenda.now);
        driver.tolerates = self.fate.tolerates();
        self.driver = Some(driver);
        self.coordinator(|_, _| {});
    }

    fn coordinator(&mut self, act: impl FnOnce(&mut Driver, Micros)) {
        let now = self.agenda.now;
        let Some(driver) = &mut self.driver else { return };
        act(driver, now);
        for act in std::mem::take(&mut driver.acts) {
            match act {
                Act::Send(member, message) => self.down(member.0, message),
                Act::Close(member) => self.close(member.0),
                Act::Busy => self.busy = now + self.draws.between(0, self.fate.busy + 1),
            }
        }
    }

    fn down(&mut self, conn: u64, message: ToWorker) {
        let Some(wire) = self.wires.get_mut(&conn).filter(|w| w.open) else { return };
        let care = care_down(&message);
        for at in wire.down.arrivals(self.agenda.now, care, &self.fate.weather, &mut self.draws) {
            self.at(at, Happening::Down(conn, message.clone()));
        }
    }

    fn up(&mut self, conn: u64, message: ToCoordinator) {
        let Some(wire) = self.wires.get_mut(&conn) else { return };
        if matches!(message, ToCoordinator::SumPiece { .. }) {
            // Sums are large: a connection can be lost in the middle of one.
            wire.up.takes(self.agenda.now, self.draws.between(0, self.fate.weather.bulk + 1));
        }
        let care = care_up(&message);
        for at in wire.up.arrivals(self.agenda.now, care, &self.fate.weather, &mut self.draws) {
            self.at(at, Happening::Up(conn, message.clone()));
        }
    }

    /// The coordinator closes a connection: the other end notices it after all sent messages.
    fn close(&mut self, conn: u64) {
        let Some(wire) = self.wires.get_mut(&conn).filter(|w| w.open) else { return };
        wire.open = false;
        let at = wire.down.arrivals(self.agenda.now, Care::InOrder, &self.fate.weather, &mut self.draws);
        if wire.host.is_some() {
            self.at(at[0], Happening::LostDown(conn));
        }
    }

    fn lost_up(&mut self, conn: u64, why: &str) {
        if self.wires.get(&conn).is_some_and(|w| w.open) {
            let reason = why.to_string();
            self.coordinator(|driver, now| driver.event(Event::Lost { member: MemberId(conn), reason }, now));
            self.close(conn);
        }
    }

    fn lost_down(&mut self, conn: u64) {
        let Some(host) = self.host_of(conn) else { return };
        if self.hosts[host].conn == Some(conn) {
            self.disconnect(host);
            let soon = self.agenda.now + self.draws.between(10 * MILLI, SECOND);
            self.at(soon, Happening::Dial(host));
        }
    }

    /// The process keeps its devices; their unfinished work is dropped.
    fn disconnect(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        host.conn = None;
        if let Some(worker) = host.worker.take() {
            host.forgeries += worker.forgeries;
            host.engines = worker.engines;
        }
    }

    fn tell(&mut self, conn: u64, act: impl FnOnce(&mut Worker, Micros) -> Vec<Effect>) {
        let now = self.agenda.now;
        let Some(worker) = self.worker(conn) else { return };
        let effects = act(worker, now);
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    let leaves = matches!(*message, ToCoordinator::Leave { .. });
                    self.up(conn, *message);
                    if leaves && let Some(host) = self.host_of(conn) {
                        self.disconnect(host);
                    }
                }
                Effect::Start { device, lease, tokens } => self.start(conn, device, lease, tokens),
                Effect::Over(bye) => self.over(conn, bye),
            }
        }
    }
}

mod blows;
mod hosts;
