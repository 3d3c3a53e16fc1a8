//! A conversation of a worker that is a relay: parts of its sums go to other workers, parts of the parameters come from
//! them.

use super::{Session, lost};
use crate::cluster::carry::Carry;
use crate::cluster::message::{Hash, RelayPlan, ToCoordinator, ToWorker};
use crate::cluster::worker::Outcome;
use crate::cluster::worker::mesh::{Event, Mesh};
use crate::cluster::worker::parameters::{Arriving, FromRelays, Parameters};
use crate::cluster::worker::relay::{Relay, cells, check};

/// The relays of a conversation.
#[derive(Default)]
pub(super) struct Relays {
    /// `None` in the coordinator's own process, and in a seat of a line.
    mesh: Option<Mesh>,
    set: Option<Set>,
    /// Step and hash of parameters that are announced and still come from relays.
    due: Option<(u64, Hash)>,
    /// Messages that need these parameters.
    deferred: Vec<ToWorker>,
    /// A set has ended: the newest parameters may come once more.
    parted: bool,
}

/// A set of relays, and this worker's part in it.
struct Set {
    number: u64,
    place: u16,
    ranges: Vec<(u64, u64)>,
    linked: bool,
    relay: Relay,
    parameters: FromRelays,
}

impl Relays {
    pub fn new(mesh: Option<Mesh>) -> Self {
        Relays { mesh, ..Relays::default() }
    }

    /// What happens among the relays. Cancel safe.
    pub async fn event(&mut self) -> Event {
        match &mut self.mesh {
            Some(mesh) => mesh.event().await,
            None => std::future::pending().await,
        }
    }

    /// Whether the message has to wait for parameters that come from relays.
    fn waits(&self, message: &ToWorker) -> bool {
        self.due.is_some()
            && matches!(
                message,
                ToWorker::Lease(_)
                    | ToWorker::Grant { .. }
                    | ToWorker::Deliver { .. }
                    | ToWorker::Deny { .. }
                    | ToWorker::Cancel { .. }
                    | ToWorker::Flush { .. }
                    | ToWorker::SumTaken { .. }
            )
    }
}

impl Set {
    fn of(plan: &RelayPlan, len: usize) -> Self {
        let range = plan.ranges[usize::from(plan.place)];
        Set {
            number: plan.set,
            place: plan.place,
            ranges: plan.ranges.clone(),
            linked: false,
            relay: Relay::new(len, range),
            parameters: FromRelays::new(&plan.ranges),
        }
    }

    /// The cells of a sum in an order in which all relays get theirs at the same time, the next place first.
    fn order(&self) -> Vec<usize> {
        let of = self.ranges.len();
        let places = (1..=of).map(|n| (usize::from(self.place) + n) % of);
        let mut ranges: Vec<_> = places.map(|place| cells(self.ranges[place])).collect();
        let longest = ranges.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        (0..longest).flat_map(|_| ranges.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()).collect()
    }

    /// The place of the relay of the cell that begins with this value.
    fn place_of(&self, offset: u64) -> usize {
        self.ranges.iter().position(|&(from, to)| (from..to).contains(&offset)).unwrap_or_default()
    }
}

impl Session<'_, '_> {
    /// Takes the messages that are about relays, and puts off those that need parameters from them. Returns the others.
    pub(super) fn heard_of_relays(&mut self, message: ToWorker) -> Result<Option<ToWorker>, Outcome> {
        match message {
            ToWorker::Listen => match &mut self.relays.mesh {
                Some(mesh) => {
                    self.relays.set = None;
                    mesh.listen();
                }
                None => self.unlinked(0, "it does not listen for other workers".into()),
            },
            ToWorker::Relay(plan) => self.placed(plan.map(|plan| *plan))?,
            ToWorker::Combine { total, of, sums } => {
                if let Some(set) = &mut self.relays.set {
                    set.relay.combine(total, of, sums);
                    self.add_totals();
                }
            }
            ToWorker::Spread { step, offset, len, packed } => {
                if let (Some(set), Some(mesh)) = (&mut self.relays.set, &self.relays.mesh) {
                    match set.parameters.piece(set.place, (step, offset, len), packed.clone()) {
                        Ok(()) => {
                            mesh.spread(&Carry::Spread { step, offset, len, packed });
                            self.begin_if_complete()?;
                        }
                        // Another relay may be some steps behind. The coordinator sends all parameters once the set has ended.
                        Err(reason) => self.leaves_relays(reason),
                    }
                }
            }
            ToWorker::Parameters { step, hash } => self.announced(step, hash)?,
            message if self.relays.waits(&message) => self.relays.deferred.push(message),
            message => return Ok(Some(message)),
        }
        Ok(None)
    }

    /// Parameters are complete, or will be once relays have brought theirs.
    fn announced(&mut self, step: u64, hash: Hash) -> Result<(), Outcome> {
        let repeats = std::mem::take(&mut self.relays.parted);
        if repeats && self.parameters.last().is_some_and(|held| (held.step, held.hash) == (step, hash)) {
            self.arriving = Arriving::default();
            return Ok(());
        }
        // Those of an earlier step do not come any more, and what needs them is over.
        if self.relays.due.take().is_none_or(|(of, _)| of != step) {
            self.relays.deferred.clear();
        }
        if self.relays.set.is_some() && !self.arriving.is_complete(step, self.len) {
            self.relays.due = Some((step, hash));
            return self.begin_if_complete();
        }
        let parameters = self.arriving.take(step, self.len).map_err(lost)?;
        self.begin_with(parameters, hash)
    }

    /// Begins a step, and takes the messages that waited for it.
    fn begin_with(&mut self, parameters: Parameters, hash: Hash) -> Result<(), Outcome> {
        self.begin(parameters, hash)?;
        for message in std::mem::take(&mut self.relays.deferred) {
            self.heard(message)?;
        }
        Ok(())
    }

    /// A place among relays, or the end of one. Parameters that are due come from the coordinator after that.
    fn placed(&mut self, plan: Option<RelayPlan>) -> Result<(), Outcome> {
        self.relays.set = None;
        let Some(mesh) = &mut self.relays.mesh else { return Ok(()) };
        match plan {
            Some(plan) => {
                check(&plan, self.len).map_err(lost)?;
                let set = Set::of(&plan, self.len);
                match mesh.connect(plan) {
                    Ok(()) => self.relays.set = Some(set),
                    Err(reason) => self.unlinked(set.number, reason),
                }
            }
            None => {
                self.outbox.drop_for_relays();
                mesh.part();
                self.relays.parted = true;
            }
        }
        Ok(())
    }

    fn unlinked(&mut self, set: u64, reason: String) {
        self.outbox.say(ToCoordinator::Unlinked { set, reason });
    }

    /// This worker cannot go on as a relay; the coordinator ends the set.
    fn leaves_relays(&mut self, reason: String) {
        let set = self.relays.set.as_mut().map_or(0, |set| {
            set.linked = false;
            set.number
        });
        self.relays.mesh.iter_mut().for_each(Mesh::part);
        self.unlinked(set, reason);
    }

    pub(super) fn among_relays(&mut self, event: Event) -> Result<(), Outcome> {
        match (event, &mut self.relays.set) {
            (Event::Listens(port), _) => self.outbox.say(ToCoordinator::Seated { port }),
            (Event::Linked, set) => {
                set.iter_mut().for_each(|set| set.linked = true);
                self.outbox.say(ToCoordinator::Linked);
            }
            (Event::Lost(reason), _) => self.leaves_relays(reason),
            (Event::Said(place, Carry::SumPiece { sum, offset, packed }), Some(set)) => {
                match set.relay.keep((place, sum), offset, packed) {
                    Ok(()) => self.add_totals(),
                    Err(reason) => self.leaves_relays(reason),
                }
            }
            (Event::Said(place, Carry::Spread { step, offset, len, packed }), Some(set)) => {
                match set.parameters.piece(place, (step, offset, len), packed) {
                    Ok(()) => self.begin_if_complete()?,
                    Err(reason) => self.leaves_relays(reason),
                }
            }
            (Event::Said(place, _), _) => {
                self.leaves_relays(format!("the relay {place} sent a message that does not belong there"));
            }
        }
        Ok(())
    }

    /// Sends the cells of the total that can be added now.
    fn add_totals(&mut self) {
        while let Some(piece) = self.relays.set.as_mut().and_then(|set| set.relay.next()) {
            match piece {
                Ok(piece) => self.outbox.say(piece),
                Err(reason) => return self.leaves_relays(reason),
            }
        }
    }

    /// Begins the step whose parameters have come from relays, if all have.
    fn begin_if_complete(&mut self) -> Result<(), Outcome> {
        let (Some((step, hash)), Some(set)) = (self.relays.due, &mut self.relays.set) else { return Ok(()) };
        let Some(held) = self.parameters.last() else { return Ok(()) };
        let parameters = match set.parameters.take(step, held) {
            Ok(Some(parameters)) => parameters,
            Ok(None) => return Ok(()),
            Err(reason) => {
                self.leaves_relays(reason);
                return Ok(());
            }
        };
        if parameters.hash != hash {
            // They come from the coordinator once the set has ended.
            self.leaves_relays("the parameters of relays are not those of the coordinator".into());
            return Ok(());
        }
        self.relays.due = None;
        self.begin_with(parameters, hash)
    }

    /// Sends the running sum of a step to the relays of this set.
    pub(super) fn flush_to_relays(&mut self, step: u64, number: u64) {
        let Session { sums, outbox, sent, relays: Relays { mesh, set, .. }, .. } = self;
        let (Some(mesh), Some(set)) = (mesh, set.as_mut().filter(|set| set.linked && set.number == number))
        else {
            return;
        };
        let Some(running) = sums.iter_mut().find(|running| running.step() == step && !running.is_empty())
        else {
            return;
        };
        *sent += 1;
        let (order, mut wrong) = (set.order(), None);
        let free = running.flush(*sent, Some(&order), &mut |message| match message.clone() {
            ToCoordinator::SumPiece { sum, offset, packed, .. } => {
                let place = set.place_of(offset);
                if place != usize::from(set.place) {
                    return mesh.send(place, Carry::SumPiece { sum, offset, packed });
                }
                if let Err(reason) = set.relay.keep((set.place, sum), offset, packed) {
                    wrong = Some(reason);
                }
            }
            mut end => {
                if let ToCoordinator::Sum { relays, .. } = &mut end {
                    *relays = Some(number);
                }
                outbox.say(end);
            }
        });
        self.free(free);
        match wrong {
            Some(reason) => self.leaves_relays(reason),
            None => self.add_totals(),
        }
    }
}
