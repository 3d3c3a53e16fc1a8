//! The faults, carried out.

use super::*;
use crate::cluster::message::{Device, Packed, Trouble};
use crate::cluster::simulator::fate::End;
use crate::model::stage::Traffic;
use crate::train::sum::RewardSums;

impl World {
    pub(super) fn blow(&mut self, blow: Blow) {
        match blow {
            Blow::Kill { worker, back, end } => self.kill(worker, back, end),
            Blow::Freeze { worker, length } => self.freeze(worker, length),
            Blow::Leave { worker, back } => {
                let Some(conn) =
                    self.hosts[worker].conn.filter(|_| self.hosts[worker].frozen <= self.agenda.now)
                else {
                    return;
                };
                self.tell(conn, |w, now| w.leave(now));
                self.hosts[worker].alive = false;
                self.at(self.agenda.now + back, Happening::Back(worker));
            }
            Blow::Reset { worker } => {
                if let Some(conn) = self.hosts[worker].conn {
                    self.black(conn);
                    self.at(self.agenda.now + MILLI, Happening::LostUp(conn, "reset"));
                    self.at(self.agenda.now + MILLI, Happening::LostDown(conn));
                }
            }
            Blow::Cut { worker } => {
                if let Some(conn) = self.hosts[worker].conn {
                    self.black(conn);
                    let (here, there) = (self.draws.between(0, SECOND), self.draws.between(0, SECOND));
                    self.at(self.agenda.now + SILENCE + here, Happening::LostUp(conn, "silent"));
                    self.at(self.agenda.now + SILENCE + there, Happening::LostDown(conn));
                }
            }
            Blow::Ill { worker, device, ill } => {
                let host = &mut self.hosts[worker];
                let engines = host.worker.as_mut().map_or(&mut host.engines, |w| &mut w.engines);
                if let Some(engine) = engines.get_mut(device) {
                    engine.ill = Some(ill);
                }
            }
            Blow::Damage { worker } => {
                self.hosts[worker].damaged = true;
                self.hosts[worker].worker.iter_mut().for_each(|w| w.damaged = true);
            }
            Blow::Pace { worker, times } => {
                let host = &mut self.hosts[worker];
                let engines = host.worker.as_mut().map_or(&mut host.engines, |w| &mut w.engines);
                engines.iter_mut().for_each(|e| e.micros_per_token *= times);
            }
            Blow::Restart { back } => self.restart(back),
            Blow::Nonsense => {
                if self.driver.is_some() && self.busy <= self.agenda.now {
                    let conn = self.connect(None);
                    self.at(self.agenda.now, Happening::Nonsense(conn));
                }
            }
        }
    }

    /// The connection passes no messages any more; those in transit are lost.
    fn black(&mut self, conn: u64) {
        self.wires.get_mut(&conn).into_iter().for_each(|w| w.black = true);
    }

    fn kill(&mut self, worker: usize, back: Option<Micros>, end: End) {
        let host = &mut self.hosts[worker];
        (host.alive, host.frozen) = (false, 0);
        let conn = host.conn;
        self.disconnect(worker);
        if let Some(conn) = conn {
            if end == End::Silent {
                self.black(conn);
            }
            let noticed = if end == End::Silent { SILENCE } else { MILLI };
            self.at(self.agenda.now + noticed, Happening::LostUp(conn, "gone"));
        }
        if let Some(back) = back {
            self.at(self.agenda.now + back, Happening::Back(worker));
        }
    }

    fn freeze(&mut self, worker: usize, length: Micros) {
        let host = &mut self.hosts[worker];
        host.frozen = self.agenda.now + length;
        if let Some(conn) = host.conn.filter(|_| length > SILENCE) {
            self.at(self.agenda.now + SILENCE, Happening::LostUp(conn, "silent"));
        }
    }

    fn restart(&mut self, back: Micros) {
        if self.driver.is_none() {
            return;
        }
        self.keep_records();
        (self.driver, self.busy) = (None, 0);
        let open: Vec<u64> = self.wires.iter().filter(|(_, w)| w.open).map(|(c, _)| *c).collect();
        open.into_iter().for_each(|conn| self.close(conn));
        self.at(self.agenda.now + back, Happening::Boot);
    }

    /// Sends one invalid message, and schedules another one.
    pub(super) fn nonsense(&mut self, conn: u64) {
        let d = &mut self.draws;
        let lease = d.between(0, 60);
        let hash = if d.chance(0.5) { truth::hash(&truth::initial()) } else { [3; 32] };
        let device = Device { name: "x".into(), class: "cpu".into() };
        let (micros, sum, step) = (u64::MAX, d.between(0, 3), d.between(0, 6));
        let message = match d.between(0, 9) {
            0 => ToCoordinator::Announce { lease, parameters: hash, micros, memory: 0 },
            1 => ToCoordinator::Stopped { lease, micros },
            2 => ToCoordinator::Fault { lease, fault: Trouble::Value { tensor: "q".into(), value: 1.0 } },
            3 => ToCoordinator::Answer { lease, ids: vec![], parameters: hash },
            4 => ToCoordinator::SumPiece { sum, offset: 0, len: 1, packed: Packed::Fixed(vec![1; 8].into()) },
            5 => {
                let leases = vec![lease, lease + 1];
                ToCoordinator::Sum {
                    sum,
                    step,
                    leases,
                    loss: 1,
                    weight: 1,
                    targets: 1,
                    rewards: RewardSums::default(),
                    parameters: hash,
                    traffic: Traffic::default(),
                    relays: None,
                }
            }
            6 => ToCoordinator::Fallback { device: 3, now: device, reason: String::new() },
            // A device that never asks for work.
            _ => ToCoordinator::Ready { devices: vec![device], refused: vec![] },
        };
        if self.wires.get(&conn).is_some_and(|w| w.open) {
            self.up(conn, message);
            let soon = self.agenda.now + self.draws.between(MILLI, 500 * MILLI);
            self.at(soon, Happening::Nonsense(conn));
        }
    }
}
