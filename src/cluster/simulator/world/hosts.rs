//! Workers' machines: how they compute, dial and join, and react to the end of a conversation.

use super::*;

impl World {
    pub(super) fn start(&mut self, conn: u64, device: usize, lease: LeaseId, tokens: u64) {
        let Some(engine) = self.worker(conn).map(|w| w.engines[device].clone()) else { return };
        if engine.ill == Some(Ill::Hang) {
            return;
        }
        let hiccup = if self.draws.chance(0.03) { 3.0 } else { 1.0 };
        let took = tokens as f64 * engine.micros_per_token * (0.95 + 0.1 * self.draws.unit()) * hiccup;
        self.at(self.agenda.now + took as Micros, Happening::Finished { conn, device, lease });
    }

    pub(super) fn over(&mut self, conn: u64, bye: Bye) {
        let Some(host) = self.host_of(conn) else { return };
        if let Bye::Out { reason, again } = bye {
            let forged = self.hosts[host].forgery.is_some() && reason.contains("microbatch");
            if !self.hosts[host].damaged && !forged && !again {
                self.wronged.push(reason);
            }
            // Its user restarts it with working memory.
            self.disconnect(host);
            if forged {
                self.hosts[host].forgery = None;
                self.found.push(self.hosts[host].forgeries);
            }
            self.hosts[host].damaged = false;
            self.at(self.agenda.now + 3 * SECOND, Happening::Dial(host));
        }
    }

    pub(super) fn dial(&mut self, host: usize) {
        if !self.hosts[host].alive || self.hosts[host].conn.is_some() {
            return;
        }
        if self.driver.is_none() {
            let later = self.agenda.now + self.draws.between(200 * MILLI, SECOND);
            return self.at(later, Happening::Dial(host));
        }
        let handshake = self.agenda.now + 40 + 4 * self.draws.around(self.fate.weather.delay);
        self.at(handshake, Happening::Accepted(host));
    }

    pub(super) fn accepted(&mut self, host: usize) {
        let all_gone = self.hosts[host].engines.iter().all(|e| e.gone);
        if !self.hosts[host].alive || self.hosts[host].conn.is_some() || all_gone {
            return;
        }
        if self.driver.is_none() || self.busy > self.agenda.now {
            return self.at(self.agenda.now + 300 * MILLI, Happening::Dial(host));
        }
        let old: Vec<u64> =
            self.wires.iter().filter(|(_, w)| w.open && w.host == Some(host)).map(|(c, _)| *c).collect();
        old.into_iter().for_each(|conn| self.lost_up(conn, "the same worker dialled again"));
        let conn = self.connect(Some(host));
        let mut worker = Worker::new(&self.plan, self.hosts[host].engines.clone());
        worker.cheats = self.fate.cheats;
        worker.asks_again = self.fate.weather.lost > 0.0;
        worker.damaged = self.hosts[host].damaged;
        worker.forgery = self.hosts[host].forgery;
        self.hosts[host].worker = Some(worker);
        self.hosts[host].conn = Some(conn);
        let loaded = self.agenda.now + self.draws.between(MILLI, 300 * MILLI);
        self.at(loaded, Happening::Loaded(conn));
        self.at(loaded, Happening::Nudge(conn));
    }

    pub(super) fn connect(&mut self, host: Option<usize>) -> u64 {
        self.conns += 1;
        let conn = self.conns;
        let wire = Wire { host, open: true, black: false, up: Way::default(), down: Way::default() };
        self.wires.insert(conn, wire);
        let name = host.map_or("nonsense".to_string(), |h| format!("w{h}"));
        self.coordinator(|driver, now| {
            driver.event(Event::Joined { member: MemberId(conn), name, here: false }, now)
        });
        conn
    }
}
