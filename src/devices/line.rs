//! Devices that hold the layers of one model together: how many layers each gets, from its measured speed and its
//! memory, and the line that they make.

use super::building::{How, Whole, note_streaming};
use super::drivers::{cpu, speaking};
use super::room::{Room, packed};
use super::seat::Seat;
use super::speed::Speed;
use crate::backend::Fault;
use crate::backend::facts::Kind;
use crate::cluster::inject::Inject;
use crate::cluster::message::Capacity;
use crate::cluster::worker::{Blueprint, Opener, Reference};
use crate::config::groups::ComputeDtype;
use crate::model::decoder::{Build, Keep};
use crate::model::layout;
use crate::model::line::{self, Line};
use crate::model::memory::{self, Estimate, Home, Load, Offload};
use crate::model::split::{MANY, Pace, Question};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use crate::support::panics::caught;
use crate::support::stderr::say;
use crate::support::waiting::LOADING;
use std::ops::Range;
use std::thread::ScopedJoinHandle;

/// The devices of a line in their order.
pub struct Seats {
    seats: Vec<Seat>,
    names: Vec<String>,
}

/// What a device of a line holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// Name of the device.
    pub name: String,
    /// Its layers.
    pub layers: Range<usize>,
    /// Policy for kept values.
    pub keep: Keep,
    /// Its memory.
    pub takes: Estimate,
    /// Bytes that it may use; `None` where unknown.
    pub limit: Option<u64>,
}

impl Place {
    /// `cuda 0: embedding, layers 0 to 14`, for the device `at` of a line.
    pub fn said(&self, at: usize, layers: usize) -> String {
        format!("{}: {}", self.name, held(at, &self.layers, layers))
    }
}

/// `embedding, layers 0 to 14`: what the device `at` of a line holds of `all` layers.
pub fn held(at: usize, layers: &Range<usize>, all: usize) -> String {
    let Range { start, end } = *layers;
    let count = if start == end { "no layers".into() } else { format!("layers {start} to {}", end - 1) };
    let embedding = if at == 0 { "embedding, " } else { "" };
    let head = if end == all { ", head" } else { "" };
    format!("{embedding}{count}{head}")
}

impl Seats {
    /// The line of these devices with their names.
    pub fn new(named: impl IntoIterator<Item = (String, Seat)>) -> Self {
        let (names, seats) = named.into_iter().unzip();
        Seats { seats, names }
    }

    /// Name of the line.
    pub fn name(&self) -> String {
        self.names.join(" + ")
    }

    /// The same line in the type that the run's user typed.
    fn typed(&self, blueprint: &Blueprint) -> Result<Self, ModelError> {
        let seats: Result<Vec<Seat>, _> = self.seats.iter().map(|seat| seat.typed(blueprint)).collect();
        Ok(Seats { seats: seats?, names: self.names.clone() })
    }

    /// Numeric class of the line, which is not opened for it.
    pub fn class(&self, places: &[Place]) -> Result<String, Fault> {
        let one =
            |(seat, place): (&Seat, &Place)| Ok((seat.device.class(seat.share.dtype)?, place.layers.clone()));
        let classes: Result<Vec<_>, Fault> = self.seats.iter().zip(places).map(one).collect();
        Ok(line::class(&classes?))
    }

    /// The speeds of all devices.
    fn speeds(&self) -> Result<Vec<Speed>, ModelError> {
        self.seats.iter().map(|seat| Ok(seat.measured()?)).collect()
    }

    /// The layers of each device with their memory. The error is that no split fits.
    pub fn places(&self, whole: &Whole) -> Result<Vec<Place>, ModelError> {
        let mut rooms = self.rooms(whole)?;
        let speeds = self.speeds()?;
        let Some(layers) = split(&mut rooms, &speeds)? else {
            return Err(self.too_little(whole, &mut rooms)?);
        };
        let place = |(at, layers): (usize, Range<usize>)| {
            let room = &mut rooms[at];
            let (keep, takes) = match whole.tokens {
                0 => {
                    let streamed = room.streams(&layers)?.unwrap_or(0);
                    let load = Load { offload: Offload::Layers(streamed), ..room.load_of(&layers) };
                    (Keep::Inputs, memory::estimate(load, Keep::Inputs)?)
                }
                _ => room.choose(&layers)?,
            };
            Ok(Place { name: self.names[at].clone(), layers, keep, takes, limit: room.limit.known() })
        };
        layers.into_iter().enumerate().map(place).collect()
    }

    /// The model's rate of training on this line, in floating point operations per second.
    pub fn rate(&self, whole: &Whole, places: &[Place]) -> Result<f64, ModelError> {
        let rooms = self.rooms(whole)?;
        let (layers, costs, speeds) = (whole.config.layers, rooms[0].costs()?, self.speeds()?);
        let paces = paces(costs, &speeds);
        let question = Question { layers, paces: &paces, ways: &[], microbatches: MANY };
        let seconds = places.iter().enumerate().map(|(seat, place)| {
            let reads = rooms[seat].reads(speeds[seat], &place.layers, place.takes.streamed);
            question.seconds(seat, &place.layers) + reads
        });
        Ok((layers as f64 * costs.0 + costs.1) / seconds.fold(f64::MIN_POSITIVE, f64::max))
    }

    /// The name under which measurements of this line are stored.
    pub fn measured_on(&self, whole: &Whole, hardware: String) -> String {
        measured_on(&self.places(whole).unwrap_or_default(), hardware)
    }

    fn rooms<'a>(&self, whole: &Whole<'a>) -> Result<Vec<Room<'a>>, ModelError> {
        let room = |(at, seat): (usize, &Seat)| {
            let seats = self.seats.len();
            let (depth, waiting) = if whole.tokens > 0 { (seats - at, seats + 2) } else { (1, 0) };
            let whole = &Whole { offload: seat.share.offload, ..*whole };
            let load = seat.device.load(&speaking(whole), seat.share.dtype)?;
            let at_home = seat.device.facts().kind == Kind::Cpu && whole.tokens == 0;
            let load = if at_home { Load { home: Home::Untrained, ..load } } else { load };
            let packed = packed(&load, whole)?;
            Ok(Room::new((load, packed), seat.share.limit, (depth, waiting)))
        };
        self.seats.iter().enumerate().map(room).collect()
    }

    /// The error of a model for which no split fits, with the settings that help: what the fullest device of the fastest
    /// split would need.
    fn too_little(&self, whole: &Whole, rooms: &mut [Room]) -> Result<ModelError, ModelError> {
        let speeds = self.speeds()?;
        let paces = paces(rooms[0].costs()?, &speeds);
        let question = Question { layers: whole.config.layers, paces: &paces, ways: &[], microbatches: MANY };
        let fastest = question.split(&mut |_, _| Some(0.0)).unwrap_or_default();
        let mut fullest = (0, 0, 0.0);
        for (at, layers) in fastest.iter().enumerate() {
            let (needed, limit) = (rooms[at].frugal(layers)?, rooms[at].limit.bytes());
            let full = needed as f64 / limit.max(1) as f64;
            if full > fullest.2 {
                fullest = (at, needed, full);
            }
        }
        let (at, needed, _) = fullest;
        let sizes = std::iter::successors(Some(whole.tokens / 2), |tokens| Some(tokens / 2));
        let fits = |tokens: &usize| {
            let rooms = self.rooms(&Whole { tokens: *tokens, ..*whole });
            let split = rooms.and_then(|mut rooms| split(&mut rooms, &speeds));
            matches!(split, Ok(Some(_)))
        };
        let smaller = sizes.take_while(|tokens| *tokens > 0).find(fits);
        let mut ways: Vec<String> = smaller.into_iter().map(tokens).collect();
        ways.push(match self.seats[at].device.facts().kind {
            Kind::Cpu => "a larger --memory-limit".into(),
            _ => "more devices in --gpus with + between them".into(),
        });
        if !rooms[at].load.quantised {
            ways.push("--quantize nf4".into());
        }
        let way_out = format!("{} has too little: use {}", self.names[at], ways.join(", or "));
        Ok(ModelError::Memory { needed, limit: rooms[at].limit.bytes(), way_out })
    }

    /// The same line in the precision of devices alone: cards compute in f32, unless another type was typed.
    pub fn exact(mut self) -> Self {
        for seat in &mut self.seats {
            if seat.share.dtype == ComputeDtype::Auto && seat.device.facts().kind != Kind::Cpu {
                seat.share.dtype = ComputeDtype::F32;
            }
        }
        self
    }

    /// Builds the model on all devices at the same time.
    fn build(&self, whole: &Whole) -> Result<Box<dyn Model>, ModelError> {
        let places = self.places(whole)?;
        if whole.has_files() {
            let layers = whole.config.layers;
            say!(
                "line     {}",
                places
                    .iter()
                    .enumerate()
                    .map(|(at, place)| place.said(at, layers))
                    .collect::<Vec<_>>()
                    .join("; ")
            );
            note_streaming(places.iter().map(|place| place.takes.streamed).sum(), layers);
        }
        let open = |(seat, place): (&Seat, &Place)| {
            let (layers, streamed) = (place.layers.clone(), place.takes.streamed);
            seat.part(whole, Build { layers, keep: place.keep, streamed, ..Build::whole(whole.config) })
        };
        let broken = |text| Err(ModelError::Source(format!("an internal error while it was opened: {text}")));
        let stages: Result<Vec<Box<dyn Model>>, ModelError> = std::thread::scope(|scope| {
            let begin = |both| scope.spawn(move || caught(|| open(both)).unwrap_or_else(broken));
            let begun: Vec<_> = self.seats.iter().zip(&places).map(begin).collect();
            let end = |one: ScopedJoinHandle<'_, _>| one.join().unwrap_or_else(|_| broken("a panic".into()));
            begun.into_iter().map(end).collect()
        });
        let layout = layout::of(whole.config, whole.lora, 0..whole.config.layers);
        Ok(Box::new(Line::new(stages?, layout)?))
    }

    /// Builds the model after the line has passed the self-test, because later results are not compared.
    pub fn proved(&self, whole: &Whole) -> Result<Box<dyn Model>, ModelError> {
        self.places(whole)?;
        let deviation = Reference::new(&cpu::ReferenceCpu)?.measure(self, &Inject::default())?;
        deviation.verdict().map_err(ModelError::Source)?;
        LOADING.begin(whole.config.layers as u64);
        self.build(whole)
    }
}

impl Opener for Seats {
    fn backend(&self) -> &str {
        "line"
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        self.typed(blueprint)?.build(&Whole::of(blueprint))
    }

    fn capacity(&self, _: &Blueprint, _most: usize) -> Result<Capacity, ModelError> {
        let why =
            "devices that hold a model together (+ in --gpus) are no seat of a line of workers (--stages)";
        Err(ModelError::Source(why.into()))
    }

    #[cfg(feature = "faults")]
    fn lose(&self) {
        self.seats.iter().for_each(|seat| seat.device.lose());
    }
}

/// The name under which measurements of a line with these places are stored ([`How::measured_on`]).
pub fn measured_on(places: &[Place], hardware: String) -> String {
    let streamed = places.iter().map(|place| place.takes.streamed).sum();
    How { streamed, ..How::resident(Keep::Inputs) }.measured_on(hardware)
}

/// Seconds of each device for a layer and for the head.
fn paces(costs: (f64, f64), speeds: &[Speed]) -> Vec<Pace> {
    speeds.iter().map(|speed| Pace::of(costs, 1e9 * speed.gflops)).collect()
}

/// The layers of each device; `None` if no split fits.
fn split(rooms: &mut [Room], speeds: &[Speed]) -> Result<Option<Vec<Range<usize>>>, ModelError> {
    let paces = paces(rooms[0].costs()?, speeds);
    let question =
        Question { layers: rooms[0].load.config.layers, paces: &paces, ways: &[], microbatches: MANY };
    let mut fault = Ok(());
    let found = question.split(&mut |seat, layers| match rooms[seat].streams(layers) {
        Ok(streamed) => Some(rooms[seat].reads(speeds[seat], layers, streamed?)),
        Err(e) => {
            fault = Err(e);
            None
        }
    });
    fault.map(|()| found)
}

fn tokens(most: usize) -> String {
    format!("--micro-batch-tokens {most} (and --max-seq-len no longer)")
}
