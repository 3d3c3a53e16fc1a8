//! What comes to a seat of a line from its neighbours, and the way back to them.

use crate::cluster::carry::Carry;
use crate::cluster::message::LeaseId;
use crate::model::wire::Wire;
use std::collections::VecDeque;
use tokio::sync::mpsc::Sender;

/// The senders to the neighbours of a seat.
#[derive(Debug, Clone, Default)]
pub(super) struct Neighbours {
    /// To the seat with the next layers; `None` for the last seat.
    pub above: Option<Sender<Carry>>,
    /// To the seat with the layers before; `None` for the first seat.
    pub below: Option<Sender<Carry>>,
    /// The type in which values travel.
    pub wire: Wire,
}

impl Neighbours {
    /// Sends hidden states up. A lost neighbour ends the conversation elsewhere.
    pub fn up(&self, lease: LeaseId, values: &[f32]) {
        send(self.above.as_ref(), Carry::parts(lease, &self.wire.bytes(values).into()));
    }

    /// Sends a gradient of hidden states down.
    pub fn down(&self, lease: LeaseId, values: &[f32]) {
        send(self.below.as_ref(), Carry::parts(lease, &self.wire.bytes(values).into()));
    }

    /// Tells the seat below the next token of a prompt.
    pub fn token(&self, lease: LeaseId, id: u32) {
        send(self.below.as_ref(), [Carry::Token { lease, id }]);
    }

    /// Tells the seat below that nothing more of this lease will come.
    pub fn dropped(&self, lease: LeaseId) {
        send(self.below.as_ref(), [Carry::Drop { lease }]);
    }
}

fn send(to: Option<&Sender<Carry>>, messages: impl IntoIterator<Item = Carry>) {
    let Some(to) = to else { return };
    for message in messages {
        if to.blocking_send(message).is_err() {
            return;
        }
    }
}

/// What a neighbour has sent.
#[derive(Debug)]
pub(super) enum Heard {
    /// Hidden states from the seat below.
    Hidden(LeaseId, Vec<f32>),
    /// From the seat above.
    Back(LeaseId, Back),
}

/// What a lease gets from the seat above.
#[derive(Debug)]
pub(super) enum Back {
    /// The gradient of its hidden states.
    Gradient(Vec<f32>),
    /// The next token of its text.
    Token(u32),
    /// Nothing more.
    Nothing,
}

/// The values that wait for a seat.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Hidden states, in the order of the seat below.
    pub hidden: VecDeque<(LeaseId, Vec<f32>)>,
    /// From the seat above, in its order.
    pub back: VecDeque<(LeaseId, Back)>,
    /// The newest lease of this conversation.
    pub newest: LeaseId,
    /// Number of the conversation: what an earlier one sends is dropped.
    pub round: u64,
    pub neighbours: Neighbours,
}

impl Inbox {
    /// Starts a conversation with these neighbours. Returns its number.
    pub fn begin(&mut self, neighbours: Neighbours) -> u64 {
        *self = Inbox { round: self.round + 1, neighbours, ..Inbox::default() };
        self.round
    }

    /// Takes what a neighbour of that conversation has sent. Returns the number of values that wait.
    pub fn take(&mut self, round: u64, heard: Heard) -> usize {
        match heard {
            _ if round != self.round => {}
            Heard::Hidden(lease, values) => self.hidden.push_back((lease, values)),
            Heard::Back(lease, back) => self.back.push_back((lease, back)),
        }
        self.hidden.len() + self.back.len()
    }
}
