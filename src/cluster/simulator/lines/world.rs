//! Virtual time, the connections, and the coordinator's side of lines (`coordinator/connections`): workers that wait, lines
//! that form, stand and fall.

use super::super::agenda::{Agenda, Next};
use super::super::driver::{Act, Disk, Driver, Outcome};
use super::super::network::{Care, Way};
use super::super::truth::{self, Plan, WIDTH};
use super::super::{Draws, MILLI, Micros, SECOND, SILENCE};
use super::seat::{Carried, Effect, Seat, joined};
use super::{Blow, Fate};
use crate::cluster::coordinator::{Between, Fall, Formed, Heard, Translation, Waits};
use crate::cluster::machine::{Config, Event, MemberId};
use crate::cluster::message::{Bye, Device, Packed, ToCoordinator, ToWorker};
use crate::cluster::sum_chunk;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

/// More events than any run needs; beyond it the run loops without time passing.
const MOST_EVENTS: u64 = 200_000;
/// How long a seat waits for the coordinator's word after the loss of a neighbour.
const LAST_WORDS: Micros = 2 * SECOND;

/// A seat by its line and place.
type At = (u64, usize);

#[derive(Debug, Clone)]
enum Happening {
    Dial(usize),
    /// A worker reports what it can hold.
    Reported(usize),
    Linked(At),
    Up(At, ToCoordinator),
    Down(At, ToWorker),
    Peer(At, Carried),
    Finished(At),
    /// The coordinator notices that a seat is gone.
    Gone(At),
    /// The coordinator's last word arrives, and how long the worker waits before it dials.
    Out(At, Micros),
    Nudge(At),
    Blow(Blow),
    Back(usize),
    Boot,
}

/// A worker's machine, and its seat if it has one.
#[derive(Default)]
struct Host {
    alive: bool,
    frozen: Micros,
    seat: Option<(At, Seat)>,
}

struct Line {
    hosts: Vec<usize>,
    layers: Vec<Range<usize>>,
    translation: Translation,
    linked: BTreeSet<usize>,
    /// Whether it is a member of the driver.
    stands: bool,
    /// Up and down of each seat, then up and down between it and the next.
    ways: Vec<[Way; 4]>,
    /// Directions in which nothing arrives.
    dropped: BTreeSet<(usize, usize)>,
}

pub struct World {
    fate: Fate,
    plan: Plan,
    agenda: Agenda<Happening>,
    driver: Option<Driver>,
    disk: Disk,
    hosts: Vec<Host>,
    waiting: Vec<usize>,
    lines: BTreeMap<u64, Line>,
    count: u64,
    draws: Draws,
}

impl World {
    pub fn new(fate: &Fate) -> Self {
        let hosts = fate.dials.iter().map(|_| Host { alive: true, ..Host::default() }).collect();
        let disk = Disk { epoch: 0, step: 0, parameters: truth::initial(), before: truth::initial() };
        let mut world = World {
            plan: fate.plan(),
            agenda: Agenda::default(),
            driver: None,
            disk,
            hosts,
            waiting: vec![],
            lines: BTreeMap::new(),
            count: 0,
            draws: Draws::new(fate.seed, 12),
            fate: fate.clone(),
        };
        world.at(0, Happening::Boot);
        fate.dials.iter().enumerate().for_each(|(host, &at)| world.at(at, Happening::Dial(host)));
        fate.blows.iter().for_each(|&(at, blow)| world.at(at, Happening::Blow(blow)));
        world
    }

    fn at(&mut self, at: Micros, what: Happening) {
        self.agenda.at(at, what);
    }

    /// Runs until the run has ended or the time is up.
    pub fn run(mut self, bound: Micros) -> (Outcome, Micros) {
        for _ in 0..MOST_EVENTS {
            let wake = self.driver.as_ref().and_then(|d| d.machine.wake()).map(|w| w.as_micros() as Micros);
            match self.agenda.next(wake, bound) {
                None => break,
                Some(Next::Wake) => self.coordinator(|driver, now| driver.event(Event::Time, now)),
                Some(Next::Happens(what)) => self.happens(what),
            }
            if self.driver.as_ref().is_some_and(|d| d.outcome != Outcome::Running) {
                break;
            }
        }
        (self.driver.map_or(Outcome::Running, |d| d.outcome), self.agenda.now)
    }

    /// The worker of a seat, unless its line is over for it.
    fn host(&self, at: At) -> Option<usize> {
        self.hosts.iter().position(|host| host.seat.as_ref().is_some_and(|(seat, _)| *seat == at))
    }

    fn happens(&mut self, what: Happening) {
        let host = match &what {
            Happening::Dial(host) => Some(*host),
            Happening::Down(at, _) | Happening::Peer(at, _) | Happening::Finished(at) => self.host(*at),
            Happening::Out(at, _) | Happening::Nudge(at) | Happening::Linked(at) => self.host(*at),
            _ => None,
        };
        // A frozen process sees no event before it continues.
        if let Some(until) = host.map(|host| self.hosts[host].frozen).filter(|until| *until > self.agenda.now)
        {
            return self.at(until, what);
        }
        match what {
            Happening::Dial(host) => {
                if self.hosts[host].alive && self.hosts[host].seat.is_none() {
                    let soon = self.agenda.now + self.draws.between(MILLI, 200 * MILLI);
                    self.at(soon, Happening::Reported(host));
                }
            }
            Happening::Reported(host) => self.reported(host),
            Happening::Linked(at) => self.linked(at),
            Happening::Up(at, message) => self.up(at, message),
            Happening::Down(at, message) => self.tell(at, |seat| seat.hears(message)),
            Happening::Peer(at, carried) => self.tell(at, |seat| seat.carried(carried)),
            Happening::Finished(at) => self.tell(at, Seat::finished),
            Happening::Gone((line, _)) => self.fall(line, None),
            Happening::Out(at, pause) => self.out(at, pause),
            Happening::Nudge(at) => {
                if self.host(at).is_some() {
                    self.tell(at, Seat::nudge);
                    self.at(self.agenda.now + 500 * MILLI, Happening::Nudge(at));
                }
            }
            Happening::Blow(blow) => self.blow(blow),
            Happening::Back(host) => {
                self.hosts[host].alive = true;
                self.at(self.agenda.now, Happening::Dial(host));
            }
            Happening::Boot => self.boot(),
        }
    }

    fn boot(&mut self) {
        let config = Config {
            expect: 1,
            min: 1,
            join_timeout: Duration::from_secs(100_000),
            reask: Duration::from_secs(2),
            patience: Duration::from_secs(5),
            recheck: Duration::from_secs(20),
            ..Config::default()
        };
        self.driver = Some(Driver::new(&self.plan, config, self.disk.clone(), self.agenda.now));
        self.coordinator(|_, _| {});
        (0..self.hosts.len()).for_each(|host| self.at(self.agenda.now, Happening::Dial(host)));
    }

    /// The division of the workers that wait, once they are enough.
    fn reported(&mut self, host: usize) {
        if self.driver.is_none() || !self.hosts[host].alive || self.waiting.contains(&host) {
            return;
        }
        self.waiting.push(host);
        let capacities: Vec<_> = self.waiting.iter().map(|host| &self.fate.capacities[*host]).collect();
        assert!(capacities.iter().all(|c| c.is_possible(WIDTH, self.fate.division.most())));
        match self.fate.division.form(&capacities, &Between::default(), Waits::NoLonger).within(&capacities) {
            Formed::No => {}
            Formed::Line(places) => {
                let ends = places.iter().map(|place| place.layers.end);
                let starts = places.iter().map(|place| place.layers.start);
                assert!(starts.eq(std::iter::once(0).chain(ends).take(places.len())), "{places:?}");
                assert!(
                    places.last().is_some_and(|place| place.layers.end == WIDTH),
                    "seats cover all layers"
                );
                assert!(places.iter().all(|p| !p.layers.is_empty() && p.needs <= capacities[p.worker].limit));
                let seats: Vec<_> =
                    places.iter().map(|place| (self.waiting[place.worker], place.layers.clone())).collect();
                self.waiting.retain(|host| seats.iter().all(|(other, _)| other != host));
                self.form(seats);
            }
            // With typed numbers of layers the worker ends; its owner starts it with more memory.
            Formed::TooSmall(one) => {
                let host = self.waiting.remove(one);
                self.fate.capacities[host].limit = 10 * WIDTH as u64 - 1;
                self.at(self.agenda.now + SECOND, Happening::Dial(host));
            }
            Formed::Whole(_) => panic!("no worker has room for all layers"),
        }
    }

    fn form(&mut self, seats: Vec<(usize, Range<usize>)>) {
        self.count += 1;
        let (id, of) = (self.count, seats.len());
        for (place, (host, layers)) in seats.iter().enumerate() {
            let mut seat = Seat::new(&self.plan, (place, of), layers.clone());
            seat.cheats = self.fate.cheats;
            self.hosts[*host].seat = Some(((id, place), seat));
            let loaded = self.agenda.now + self.draws.between(10 * MILLI, SECOND);
            self.at(loaded, Happening::Linked((id, place)));
        }
        let (hosts, layers): (Vec<usize>, Vec<Range<usize>>) = seats.into_iter().unzip();
        let values: Vec<_> = layers.iter().map(|layers| 2 * layers.start..2 * layers.end).collect();
        let line = Line {
            translation: Translation::new(&values),
            linked: BTreeSet::new(),
            stands: false,
            ways: vec![<[Way; 4]>::default(); of],
            dropped: BTreeSet::new(),
            hosts,
            layers,
        };
        self.lines.insert(id, line);
    }

    /// A line joins the driver once all of its seats are connected.
    fn linked(&mut self, (id, place): At) {
        self.at(self.agenda.now + 500 * MILLI, Happening::Nudge((id, place)));
        let Some(line) = self.lines.get_mut(&id) else { return };
        line.linked.insert(place);
        if line.linked.len() == line.hosts.len() {
            line.stands = true;
            let devices = vec![Device { name: "line".into(), class: "cpu".into() }];
            let ready = ToCoordinator::Ready { devices, refused: vec![] };
            let (member, name) = (MemberId(id), format!("line {id}"));
            self.coordinator(|driver, now| {
                driver.event(Event::Joined { member, name, here: false }, now);
                driver.hears(member, &ready, now);
            });
        }
    }

    /// Lets the driver act, and carries out what it says to lines.
    fn coordinator(&mut self, act: impl FnOnce(&mut Driver, Micros)) {
        let now = self.agenda.now;
        let Some(driver) = &mut self.driver else { return };
        act(driver, now);
        for act in std::mem::take(&mut driver.acts) {
            match act {
                Act::Send(member, ToWorker::Bye(bye)) => {
                    assert!(!matches!(bye, Bye::Out { again: false, .. }), "a line was expelled: {bye:?}");
                    self.end(member.0, None);
                }
                Act::Send(member, message) => {
                    let line = self.lines.get_mut(&member.0).filter(|line| line.stands);
                    let messages =
                        line.map(|line| line.translation.down(halved(message))).unwrap_or_default();
                    messages.into_iter().for_each(|(place, message)| self.down((member.0, place), message));
                }
                Act::Close(member) => self.end(member.0, None),
                Act::Busy => {}
            }
        }
    }

    /// The time at which something arrives that is sent now.
    fn arrival(&mut self, (id, place): At, way: usize) -> Option<Micros> {
        let line = self.lines.get_mut(&id)?;
        let way = &mut line.ways[place][way];
        way.arrivals(self.agenda.now, Care::InOrder, &self.fate.weather, &mut self.draws).pop()
    }

    fn down(&mut self, at: At, message: ToWorker) {
        let arrival = self.arrival(at, 1);
        arrival.into_iter().for_each(|arrival| self.at(arrival, Happening::Down(at, message.clone())));
    }

    /// A message of a seat reaches its line.
    fn up(&mut self, (id, place): At, message: ToCoordinator) {
        let Some(line) = self.lines.get_mut(&id).filter(|line| line.stands) else { return };
        match line.translation.up(place, message) {
            Ok(Heard { driver, seats }) => {
                seats.into_iter().for_each(|(place, message)| self.down((id, place), message));
                for message in driver {
                    let message = whole(message);
                    self.coordinator(|driver, now| driver.hears(MemberId(id), &message, now));
                }
            }
            Err(Fall::Lost(_)) => self.fall(id, None),
            Err(Fall::Broke(reason)) => {
                let host = line.hosts[place];
                let damaged = self.fate.blows.iter().any(|(_, blow)| *blow == Blow::Damage { host });
                assert!(damaged, "an honest seat was taken out: {reason}");
                self.fall(id, Some(place));
            }
        }
    }

    /// A line falls: the driver loses a member, and its workers come again but for the guilty one.
    fn fall(&mut self, id: u64, guilty: Option<usize>) {
        if self.lines.get(&id).is_some_and(|line| line.stands) {
            let (member, reason) = (MemberId(id), "the line fell".to_string());
            self.coordinator(|driver, now| driver.event(Event::Lost { member, reason }, now));
        }
        self.end(id, guilty);
    }

    fn end(&mut self, id: u64, guilty: Option<usize>) {
        for place in 0..self.lines.get(&id).map_or(0, |line| line.hosts.len()) {
            let arrival = self.arrival((id, place), 1);
            // A process that may not come again is restarted.
            let again = guilty != Some(place);
            let pause = if again { self.draws.between(10 * MILLI, SECOND) } else { 2 * SECOND };
            let out = Happening::Out((id, place), pause);
            arrival.into_iter().for_each(|arrival| self.at(arrival, out.clone()));
        }
        self.lines.remove(&id);
    }

    /// The worker leaves its seat and dials again.
    fn out(&mut self, at: At, pause: Micros) {
        let Some(host) = self.host(at) else { return };
        self.hosts[host].seat = None;
        self.at(self.agenda.now + pause, Happening::Dial(host));
    }

    fn tell(&mut self, at: At, act: impl FnOnce(&mut Seat) -> Vec<Effect>) {
        let Some(host) = self.host(at) else { return };
        let Some((_, seat)) = &mut self.hosts[host].seat else { return };
        let (id, place) = at;
        for effect in act(seat) {
            match effect {
                Effect::Up(message) => {
                    let arrival = self.arrival(at, 0);
                    arrival
                        .into_iter()
                        .for_each(|arrival| self.at(arrival, Happening::Up(at, *message.clone())));
                }
                Effect::Above(carried) => self.carry((id, place, place + 1), 2, carried),
                Effect::Below(carried) => self.carry((id, place, place - 1), 3, carried),
                Effect::Start(tokens) => {
                    let layers = self.lines.get(&id).map_or(1, |line| line.layers[place].len());
                    let time = tokens as f64 * layers as f64 * self.fate.pace(host);
                    self.at(self.agenda.now + 1 + time as Micros, Happening::Finished(at));
                }
            }
        }
    }

    /// Sends to a neighbour. A seat that repeats values of a microbatch changes no byte.
    fn carry(&mut self, (id, from, to): (u64, usize, usize), way: usize, carried: Carried) {
        let Some(line) = self.lines.get(&id).filter(|line| !line.dropped.contains(&(from, to))) else {
            return;
        };
        debug_assert!(to < line.hosts.len());
        let carried = match carried {
            Carried::Hidden(lease, value) if self.fate.mixes => Carried::Hidden(lease, value ^ 1),
            carried => carried,
        };
        let arrival = self.arrival((id, from), way);
        arrival.into_iter().for_each(|arrival| self.at(arrival, Happening::Peer((id, to), carried)));
        let repeats = matches!(carried, Carried::Gradient(..)) && self.draws.chance(self.fate.weather.twice);
        if repeats && let Some(arrival) = self.arrival((id, from), way) {
            let later = arrival + self.draws.around(50 * MILLI);
            self.at(later, Happening::Peer((id, to), carried));
        }
    }

    fn blow(&mut self, blow: Blow) {
        let seated = |host: usize| self.hosts[host].seat.as_ref().map(|(at, _)| *at);
        match blow {
            Blow::Kill { host, back, silent } => {
                if !self.hosts[host].alive {
                    return;
                }
                let noticed = self.agenda.now + if silent { SILENCE } else { MILLI };
                seated(host).into_iter().for_each(|at| self.at(noticed, Happening::Gone(at)));
                self.hosts[host] = Host::default();
                self.waiting.retain(|other| *other != host);
                self.at(self.agenda.now + back, Happening::Back(host));
            }
            Blow::Freeze { host, length } => {
                self.hosts[host].frozen = self.agenda.now + length;
                if let Some(at) =
                    self.hosts[host].seat.as_ref().map(|(at, _)| *at).filter(|_| length > SILENCE)
                {
                    self.at(self.agenda.now + SILENCE, Happening::Gone(at));
                }
            }
            // The seat that hears nothing leaves; the coordinator's connections stay up.
            Blow::Drop { host, upwards } => {
                let Some((id, place)) = seated(host) else { return };
                let Some(line) = self.lines.get_mut(&id) else { return };
                let to = if upwards { Some(place + 1) } else { place.checked_sub(1) };
                if let Some(to) = to.filter(|to| *to < line.hosts.len()) {
                    line.dropped.insert((place, to));
                    self.at(self.agenda.now + SILENCE + LAST_WORDS, Happening::Gone((id, to)));
                }
            }
            Blow::Ill { host } => self.hosts[host].seat.iter_mut().for_each(|(_, seat)| seat.ill = true),
            Blow::Damage { host } => {
                self.hosts[host].seat.iter_mut().for_each(|(_, seat)| seat.damaged = true)
            }
            Blow::Restart { back } => {
                if let Some(driver) = self.driver.take() {
                    self.disk = driver.disk;
                    (0..=self.count).for_each(|id| self.end(id, None));
                    self.waiting.clear();
                    self.at(self.agenda.now + back, Happening::Boot);
                }
            }
        }
    }
}

/// The parameters have eight bytes for a value, and values of a line four: one is two of them.
fn halved(message: ToWorker) -> ToWorker {
    match message {
        ToWorker::ParametersPiece { step, offset, bytes } => {
            ToWorker::ParametersPiece { step, offset: 2 * offset, bytes }
        }
        message => message,
    }
}

/// The same for pieces of sums, in the other direction.
fn whole(message: ToCoordinator) -> ToCoordinator {
    match message {
        ToCoordinator::SumPiece { sum, offset, len, packed } => {
            assert_eq!((offset, len as usize), (0, 2 * WIDTH), "a sum of a line is sent once, whole");
            let mut numbers = vec![0; 2 * WIDTH];
            sum_chunk::set(&packed, &mut numbers, i64::MAX).expect("a sum that was put together");
            let packed = Packed::Fixed(truth::bytes(&joined(&numbers)).into());
            ToCoordinator::SumPiece { sum, offset, len: WIDTH as u32, packed }
        }
        message => message,
    }
}
