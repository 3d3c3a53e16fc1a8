//! Virtual time: what happens next, in an order that the times and the order of planning decide.

use super::Micros;
use std::collections::BTreeMap;

pub struct Agenda<T> {
    pub now: Micros,
    order: u64,
    ahead: BTreeMap<(Micros, u8, u64), T>,
}

/// What comes next.
pub enum Next<T> {
    /// The time that the machine waits for.
    Wake,
    Happens(T),
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Agenda { now: 0, order: 0, ahead: BTreeMap::new() }
    }
}

impl<T> Agenda<T> {
    pub fn at(&mut self, at: Micros, what: T) {
        self.order += 1;
        self.ahead.insert((at.max(self.now), 1, self.order), what);
    }

    /// Postpones an event to the front of those at that time.
    pub fn put_off(&mut self, at: Micros, what: T) {
        self.order += 1;
        self.ahead.insert((at, 0, self.order), what);
    }

    /// Goes on to what comes next, at the latest to the first event beyond `bound`. `None` at the end.
    pub fn next(&mut self, wake: Option<Micros>, bound: Micros) -> Option<Next<T>> {
        let next = self.ahead.first_key_value().map(|(key, _)| key.0);
        let wakes = wake.is_some_and(|wake| next.is_none_or(|next| wake < next));
        let now = if wakes { wake } else { next }?;
        self.now = now.max(self.now);
        match wakes {
            _ if now > bound => None,
            true => Some(Next::Wake),
            false => self.ahead.pop_first().map(|(_, what)| Next::Happens(what)),
        }
    }
}
