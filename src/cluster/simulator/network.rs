//! Connections: messages arrive in order; those that the protocol repeats until they are answered may also arrive
//! late, twice or never.

use super::super::message::{ToCoordinator, ToWorker};
use super::{Draws, Micros};

/// Properties of a network.
#[derive(Debug, Clone, Default)]
pub struct Weather {
    /// Mean delay one way.
    pub delay: Micros,
    /// Largest additional delay of a piece of a sum.
    pub bulk: Micros,
    /// Random part of the delay, 0 to 1.
    pub jitter: f64,
    /// Fraction of the unordered messages that are lost.
    pub lost: f64,
    /// Fraction that arrive twice.
    pub twice: f64,
    /// Fraction that are overtaken.
    pub late: f64,
}

/// The delivery that the protocol requires for a message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Care {
    /// Once, in order.
    InOrder,
    /// None: the message is repeated until it is answered, or is only advice.
    None,
}

pub fn care_up(message: &ToCoordinator) -> Care {
    match message {
        ToCoordinator::Announce { .. } | ToCoordinator::Ask { .. } => Care::None,
        _ => Care::InOrder,
    }
}

pub fn care_down(message: &ToWorker) -> Care {
    use ToWorker::{Cancel, Deliver, Deny, Flush, Grant, SumTaken};
    match message {
        Deliver { .. } | Grant { .. } | Deny { .. } | Cancel { .. } | Flush { .. } | SumTaken { .. } => {
            Care::None
        }
        _ => Care::InOrder,
    }
}

/// One direction of a connection.
#[derive(Debug, Clone, Default)]
pub struct Way {
    last: Micros,
}

impl Way {
    /// Delays all later messages by `length`.
    pub fn takes(&mut self, now: Micros, length: Micros) {
        self.last = self.last.max(now) + length;
    }

    /// Arrival times of a message sent now: one time in order, or any number of times if no order is required.
    pub fn arrivals(&mut self, now: Micros, care: Care, weather: &Weather, draws: &mut Draws) -> Vec<Micros> {
        let chance = (weather.delay as f64 * weather.jitter) as Micros;
        let in_order = (now + 20 + weather.delay - chance + draws.around(chance)).max(self.last + 1);
        if care == Care::InOrder {
            self.last = in_order;
            return vec![in_order];
        }
        if draws.chance(weather.lost) {
            return vec![];
        }
        let mut all = vec![if draws.chance(weather.late) {
            in_order + draws.around(20 * weather.delay)
        } else {
            in_order
        }];
        if draws.chance(weather.twice) {
            all.push(in_order + draws.around(50 * weather.delay));
        }
        if all[0] == in_order {
            self.last = in_order;
        }
        all
    }
}
