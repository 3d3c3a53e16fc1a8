//! Connections: what is sent arrives in order, or, where the protocol asks for no order and says things again,
//! late, twice or not at all.

use super::super::message::{ToCoordinator, ToWorker};
use super::{Draws, Micros};

/// How a network treats its messages.
#[derive(Debug, Clone, Default)]
pub struct Weather {
    /// Mean delay one way.
    pub delay: Micros,
    /// What a piece of a sum takes besides, at most.
    pub bulk: Micros,
    /// How much of the delay is chance.
    pub jitter: f64,
    /// Of messages that are said again until they are answered: how many are lost,
    pub lost: f64,
    /// come twice,
    pub twice: f64,
    /// and are overtaken.
    pub late: f64,
}

/// What the protocol asks for a message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Care {
    /// To arrive once, in order.
    InOrder,
    /// Nothing: it is said again if it is not answered, or is only advice.
    None,
}

pub fn care_up(message: &ToCoordinator) -> Care {
    match message {
        ToCoordinator::Announce { .. } | ToCoordinator::Ask { .. } => Care::None,
        _ => Care::InOrder,
    }
}

pub fn care_down(message: &ToWorker) -> Care {
    use ToWorker::{Cancel, Deny, Flush, Grant, SumTaken};
    match message {
        Grant { .. } | Deny { .. } | Cancel { .. } | Flush { .. } | SumTaken { .. } => Care::None,
        _ => Care::InOrder,
    }
}

/// One direction of a connection.
#[derive(Debug, Clone, Default)]
pub struct Way {
    last: Micros,
}

impl Way {
    /// What is sent now takes so long to pass.
    pub fn takes(&mut self, now: Micros, length: Micros) {
        self.last = self.last.max(now) + length;
    }

    /// When a message that is sent now arrives: once in order, or, where that is not asked for, so often and whenever.
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
