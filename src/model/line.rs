//! A line: stages that together hold the layers of one model, each on its own device and thread, as one [`Stage`].
//! Hidden states and their gradients go from thread to thread, and microbatches follow each other without waiting for
//! whole passes.
//!
//! All seats follow one rule: a backward pass that is ready goes first, else a forward pass that is ready, if fewer than
//! the seat's depth wait for their backward pass. The order of passes changes no bit, so there is no schedule.

use super::layout::Layout;
use super::stage::{
    Cancel, Each, Fault, LossSums, Microbatch, Model, Next, Output, Session, Span, Stage, Ticket, Traffic,
    Want,
};
use crate::support::panics::caught;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time after which the line looks again for a microbatch to begin.
const LOOK: Duration = Duration::from_millis(1);

/// A whole model in several seats.
pub struct Line {
    seats: Vec<Seat>,
    layout: Layout,
    longest_row: usize,
    short_rows: Option<usize>,
    class: String,
}

/// A stage on its thread.
struct Seat {
    span: Span,
    /// `None` once the line is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// Work for a seat's thread.
type Job = Box<dyn FnOnce(&mut dyn Model) + Send>;

/// The result of work on a seat's thread, or the text of its panic.
type Hear<R> = Receiver<Result<R, String>>;

impl Seat {
    fn new(mut stage: Box<dyn Model>) -> Self {
        let (span, (jobs, given)) = (stage.span(), channel::<Job>());
        let thread = std::thread::spawn(move || {
            given.into_iter().for_each(|job| job(&mut *stage));
            // Dropping the stage of a lost device may panic.
            drop(caught(|| drop(stage)));
        });
        Seat { span, jobs: Some(jobs), thread: Some(thread) }
    }

    /// Begins work on the seat's thread.
    fn begin<R: Send + 'static>(&self, job: impl FnOnce(&mut dyn Model) -> R + Send + 'static) -> Hear<R> {
        let (say, hear) = channel();
        let job: Job = Box::new(move |stage| drop(say.send(caught(|| job(stage)))));
        self.jobs.iter().zip([job]).for_each(|(jobs, job)| drop(jobs.send(job)));
        hear
    }

    /// Waits for the result of work.
    fn hear<R>(&self, hear: &Hear<R>) -> Result<R, Fault> {
        let heard = hear.recv().unwrap_or_else(|_| Err("its thread has ended".into()));
        let Span { layers, .. } = &self.span;
        let device = || format!("layers {}..{}", layers.start, layers.end);
        heard.map_err(|text| fault(&device(), &format!("an internal error: {text}")))
    }

    /// Works on the seat's thread, and waits.
    fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut dyn Model) -> R + Send + 'static,
    ) -> Result<R, Fault> {
        self.hear(&self.begin(job))
    }
}

fn fault(device: &str, reason: &str) -> Fault {
    Fault::Device { device: device.into(), reason: reason.into() }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.seats.iter_mut().for_each(|seat| drop(seat.jobs.take()));
        self.seats.iter_mut().for_each(|seat| drop(seat.thread.take().map(JoinHandle::join)));
    }
}

impl Line {
    /// A line of stages that hold all layers, in their order; `layout` is that of the whole model.
    pub fn new(stages: Vec<Box<dyn Model>>, layout: Layout) -> Result<Self, Fault> {
        let spans: Vec<Span> = stages.iter().map(|stage| stage.span()).collect();
        let follow = |pair: &[Span]| {
            pair[0].layers.end == pair[1].layers.start && pair[0].values.end == pair[1].values.start
        };
        let whole = spans.first().is_some_and(|span| span.first && span.values.start == 0)
            && spans.last().is_some_and(|span| span.last && span.values.end == layout.len())
            && spans.windows(2).all(follow)
            && spans.iter().filter(|span| span.last).count() == 1;
        if !whole {
            return Err(fault("line", "its stages do not hold the layers of a model one after another"));
        }
        let longest_row = stages.iter().map(|stage| stage.longest_row()).min().unwrap_or(0);
        let short_rows = stages.iter().filter_map(|stage| stage.short_rows()).min();
        let classes = stages.iter().map(|stage| (stage.class(), stage.span().layers));
        let class = class(&classes.collect::<Vec<_>>());
        let seats = stages.into_iter().map(Seat::new).collect();
        Ok(Line { seats, layout, longest_row, short_rows, class })
    }

    /// Begins the same work on all seats, and waits for all of them.
    fn all<R: Send + 'static>(
        &self,
        job: impl Fn(&mut dyn Model) -> R + Clone + Send + 'static,
    ) -> Result<Vec<R>, Fault> {
        let begun: Vec<Hear<R>> = self.seats.iter().map(|seat| seat.begin(job.clone())).collect();
        self.seats.iter().zip(&begun).map(|(seat, hear)| seat.hear(hear)).collect()
    }

    /// Gives the hidden states of each seat to the next one, and returns the output of the last one.
    fn pass(
        &self,
        work: impl Fn(&mut dyn Model, Option<&[f32]>) -> Result<Output, Fault> + Clone + Send + 'static,
    ) -> Result<Output, Fault> {
        let mut hidden: Option<Vec<f32>> = None;
        for seat in &self.seats {
            let (work, input) = (work.clone(), hidden.take());
            match seat.run(move |stage| work(stage, input.as_deref()))?? {
                Output::Hidden(values) => hidden = Some(values),
                output => return Ok(output),
            }
        }
        Err(fault("line", "the last stage gave hidden states"))
    }
}

/// The class of all seats, or the class and the layers of each: values of unlike devices depend on the split.
pub fn class(seats: &[(String, Range<usize>)]) -> String {
    let same = seats.iter().all(|(class, _)| *class == seats[0].0);
    let one = |(class, layers): &(String, Range<usize>)| format!("{class}[{}..{}]", layers.start, layers.end);
    if same { seats[0].0.clone() } else { seats.iter().map(one).collect::<Vec<_>>().join("+") }
}

/// What comes to a seat.
enum Carried {
    /// A microbatch to begin, in order, from the line.
    Batch(Arc<Microbatch>),
    /// Hidden states from the seat below, in the order of the microbatches.
    Hidden(Vec<f32>),
    /// The gradient of hidden states from the seat above, in the order of the microbatches.
    Gradient(Vec<f32>),
    /// The line's last word: all work is done, or a seat has failed.
    End,
}

/// A seat's part of the gradient of a microbatch, and the loss from the last seat. The parts of a seat come in the
/// order of the microbatches.
struct Part {
    seat: usize,
    loss: Option<LossSums>,
    gradient: Vec<f32>,
}

/// What connects a seat with the others while gradients are computed.
struct Links {
    seat: usize,
    depth: usize,
    come: Receiver<Carried>,
    above: Option<Sender<Carried>>,
    below: Option<Sender<Carried>>,
    done: Sender<Result<Part, Fault>>,
}

/// The ticket of a microbatch.
fn ticket(index: u64) -> Ticket {
    Ticket(u64::MAX - 1 - index)
}

/// The microbatches of a seat: `ended..begun` are between their passes.
#[derive(Default)]
struct Round {
    begun: u64,
    ended: u64,
    batches: VecDeque<Arc<Microbatch>>,
    hidden: VecDeque<Vec<f32>>,
    gradients: VecDeque<Vec<f32>>,
}

impl Round {
    /// Runs both passes of all microbatches until the line's last word, and reports a fault. Nothing of any pass remains.
    fn run(mut self, stage: &mut dyn Model, links: Links) {
        let end = caught(|| {
            let end = self.passes(stage, &links);
            (self.ended..=self.begun).for_each(|index| stage.forget(ticket(index)));
            end
        });
        let end =
            end.unwrap_or_else(|text| Err(fault(&stage.class(), &format!("an internal error: {text}"))));
        if let Err(fault) = end {
            let _ = links.done.send(Err(fault));
        }
    }

    fn passes(&mut self, stage: &mut dyn Model, links: &Links) -> Result<(), Fault> {
        loop {
            let room = self.begun - self.ended < links.depth as u64;
            let arrived = !self.batches.is_empty() && (links.below.is_none() || !self.hidden.is_empty());
            let ready = !self.gradients.is_empty() || (room && arrived);
            // What came in the meantime is sorted before the next pass is chosen.
            let carried = match ready {
                true => links.come.try_recv().ok(),
                false => Some(links.come.recv().unwrap_or(Carried::End)),
            };
            match carried {
                Some(Carried::Batch(batch)) => self.batches.push_back(batch),
                Some(Carried::Hidden(values)) => self.hidden.push_back(values),
                Some(Carried::Gradient(values)) => self.gradients.push_back(values),
                Some(Carried::End) => return Ok(()),
                None => match self.gradients.pop_front() {
                    Some(values) => self.backward(stage, links, (Some(values), None))?,
                    None => self.forward(stage, links)?,
                },
            }
        }
    }

    /// Runs a forward pass, in the last seat both passes.
    fn forward(&mut self, stage: &mut dyn Model, links: &Links) -> Result<(), Fault> {
        let (Some(batch), input) = (self.batches.pop_front(), self.hidden.pop_front()) else { return Ok(()) };
        let output = stage.forward(&batch, input.as_deref(), Want::Gradient(ticket(self.begun)))?;
        self.begun += 1;
        match (output, &links.above) {
            (Output::Hidden(values), Some(above)) => {
                let _ = above.send(Carried::Hidden(values));
                Ok(())
            }
            (Output::Loss(sums), None) => self.backward(stage, links, (None, Some(sums))),
            _ => Err(fault(&stage.class(), "a stage gave another output than its place asks for")),
        }
    }

    fn backward(
        &mut self,
        stage: &mut dyn Model,
        links: &Links,
        (grad, loss): (Option<Vec<f32>>, Option<LossSums>),
    ) -> Result<(), Fault> {
        let mut gradient = vec![0.0; stage.layout().len()];
        let input = stage.backward(ticket(self.ended), grad.as_deref(), &mut gradient)?;
        self.ended += 1;
        if let (Some(values), Some(below)) = (input, &links.below) {
            let _ = below.send(Carried::Gradient(values));
        }
        let _ = links.done.send(Ok(Part { seat: links.seat, loss, gradient }));
        Ok(())
    }
}

/// A round on all seats. They are free again once it is dropped.
struct Running {
    to: Vec<Sender<Carried>>,
    parts: Receiver<Result<Part, Fault>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.to.iter().for_each(|seat| drop(seat.send(Carried::End)));
        while self.parts.recv().is_ok() {}
    }
}

/// Gradients of microbatches, some parts of which have come.
struct Assembly<'a> {
    seats: &'a [Seat],
    len: usize,
    /// Parts that have come from each seat.
    came: Vec<usize>,
    /// The microbatches from `next` on: missing parts, loss, values.
    open: VecDeque<(usize, Option<LossSums>, Vec<f32>)>,
    /// The microbatch that is given away next.
    next: usize,
}

impl Assembly<'_> {
    fn add(&mut self, part: Part, each: Each) {
        let at = self.came[part.seat] - self.next;
        self.came[part.seat] += 1;
        if at == self.open.len() {
            self.open.push_back((self.seats.len(), None, vec![0.0; self.len]));
        }
        let (missing, loss, flat) = &mut self.open[at];
        flat[self.seats[part.seat].span.values.clone()].copy_from_slice(&part.gradient);
        *missing -= 1;
        *loss = part.loss.or(loss.take());
        while let Some((_, loss, flat)) = self.open.pop_front_if(|(missing, ..)| *missing == 0) {
            loss.into_iter().for_each(|loss| each(self.next, &loss, &flat));
            self.next += 1;
        }
    }
}

impl Line {
    /// Begins a round on all seats.
    fn round(&self) -> Running {
        let (done, parts) = channel();
        let (to, come): (Vec<_>, Vec<_>) = self.seats.iter().map(|_| channel()).unzip();
        for ((at, seat), come) in self.seats.iter().enumerate().zip(come) {
            let (above, below) = (to.get(at + 1).cloned(), at.checked_sub(1).map(|below| to[below].clone()));
            let (done, depth) = (done.clone(), self.seats.len() - at);
            let links = Links { seat: at, depth, come, above, below, done };
            drop(seat.begin(move |stage| Round::default().run(stage, links)));
        }
        Running { to, parts }
    }
}

impl Line {
    /// Runs the backward pass of one seat after the other.
    fn descend(
        &self,
        ticket: Ticket,
        grad: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Fault> {
        let mut above = grad.map(<[f32]>::to_vec);
        for seat in self.seats.iter().rev() {
            let grad = above.take();
            let both = seat.run(move |stage| {
                let mut part = vec![0.0; stage.layout().len()];
                stage.backward(ticket, grad.as_deref(), &mut part).map(|input| (part, input))
            });
            let (part, input) = both??;
            gradient[seat.span.values.clone()].copy_from_slice(&part);
            above = input;
        }
        Ok(above)
    }
}

impl Stage for Line {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn class(&self) -> String {
        self.class.clone()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        if flat.len() != self.layout.len() {
            let reason = format!("{} parameters for a layout of {}", flat.len(), self.layout.len());
            return Err(fault("line", &reason));
        }
        let begin = |seat: &Seat| {
            let values = flat[seat.span.values.clone()].to_vec();
            seat.begin(move |stage| stage.set_parameters(&values))
        };
        let begun: Vec<_> = self.seats.iter().map(begin).collect();
        self.seats.iter().zip(&begun).try_for_each(|(seat, hear)| seat.hear(hear)?)
    }

    fn span(&self) -> Span {
        let layers = 0..self.seats.last().map_or(0, |seat| seat.span.layers.end);
        Span { layers, values: 0..self.layout.len(), first: true, last: true }
    }

    fn forward(&mut self, batch: &Microbatch, _: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        let shared = Arc::new(batch.clone());
        let output = self.pass(move |stage, input| stage.forward(&shared, input, want));
        if let (Err(_), Some(ticket)) = (&output, want.ticket()) {
            self.forget(ticket);
        }
        output
    }

    fn backward(
        &mut self,
        ticket: Ticket,
        grad: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Fault> {
        let input = self.descend(ticket, grad, gradient);
        if input.is_err() {
            self.forget(ticket);
        }
        input
    }

    fn forget(&mut self, ticket: Ticket) {
        let _ = self.all(move |stage| stage.forget(ticket));
    }

    fn gradients(&mut self, next: Next, each: Each) -> Result<(), Fault> {
        let round = self.round();
        let (seats, len, came) = (&self.seats[..], self.layout.len(), vec![0; self.seats.len()]);
        let mut sums = Assembly { seats, len, came, open: VecDeque::new(), next: 0 };
        let mut given = 0;
        loop {
            while given - sums.next < self.together()
                && let Some(batch) = next()
            {
                let batch = Arc::new(batch);
                round.to.iter().for_each(|seat| drop(seat.send(Carried::Batch(batch.clone()))));
                given += 1;
            }
            if given == sums.next {
                return Ok(());
            }
            match round.parts.recv_timeout(LOOK) {
                Ok(part) => sums.add(part?, each),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(fault("line", "its threads have ended")),
            }
        }
    }

    fn together(&self) -> usize {
        // One more waits before the first seat.
        self.seats.len() + 1
    }

    fn extend_all(&mut self, texts: &[(Session, &[u32])], _: Option<&[f32]>) -> Result<Output, Fault> {
        let texts: Vec<(Session, Vec<u32>)> =
            texts.iter().map(|(session, ids)| (*session, ids.to_vec())).collect();
        self.pass(move |stage, input| {
            let texts: Vec<(Session, &[u32])> =
                texts.iter().map(|(session, ids)| (*session, &ids[..])).collect();
            stage.extend_all(&texts, input)
        })
    }

    fn end(&mut self, session: Session) {
        let _ = self.all(move |stage| stage.end(session));
    }

    fn longest_row(&self) -> usize {
        self.longest_row
    }

    fn short_rows(&self) -> Option<usize> {
        self.short_rows
    }

    fn traffic(&self) -> Traffic {
        let all = self.all(|stage| stage.traffic()).unwrap_or_default();
        all.iter().fold(Traffic::default(), |mut sum, one| {
            sum.add(one);
            sum
        })
    }

    fn heed(&mut self, cancel: Cancel) {
        let _ = self.all(move |stage| stage.heed(cancel.clone()));
    }
}
