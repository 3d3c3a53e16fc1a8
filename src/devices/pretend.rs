//! Simulated devices for tests of real processes: a missing backend, and a CPU under another backend's name, for tests
//! of the fallback.

use crate::backend::facts::{Facts, Kind};
use crate::cluster::inject::Inject;
use crate::cluster::message::Capacity;
use crate::cluster::worker::{Blueprint, Equipment, Opener};
use crate::model::layout::Layout;
use crate::model::stage::{
    Cancel, Fault, InUse, LossSums, Microbatch, Model, Output, Session, Span, Stage, Ticket, Traffic, Want,
};
use crate::model::weights::ModelError;
use std::sync::Arc;

/// Their driver, which has no devices: the CPU computes in their place.
pub const DRIVER: &str = "pretended";

/// The cards of a machine that pretends to have some.
pub fn cards() -> Vec<Facts> {
    let count = Inject::quietly().cards();
    let card = |nth: usize| Facts {
        name: "NVIDIA card".into(),
        kind: Kind::Discrete,
        api: "vulkan".into(),
        pci: format!("0000:{nth:02x}:00.0"),
        card: format!("{nth:02x}:00.0"),
        ..Facts::default()
    };
    (1..=count).map(card).collect()
}

/// Puts the pretended backends before the real ones of every device, whose last one is the CPU.
pub fn ahead(mut equipment: Equipment) -> Equipment {
    let Some(name) = equipment.inject.pretend().map(String::from) else { return equipment };
    for chain in equipment.candidates.iter_mut().map(|candidate| &mut candidate.chain) {
        let Some(cpu) = chain.last().cloned() else { continue };
        let first: Arc<dyn Opener> = Arc::new(Pretended { name: name.clone(), cpu });
        let next = (name == "cuda").then(|| Arc::new(NotBuilt("wgpu")) as Arc<dyn Opener>);
        chain.splice(..0, [first].into_iter().chain(next));
    }
    equipment
}

/// A backend that is not part of this build.
struct NotBuilt(&'static str);

impl Opener for NotBuilt {
    fn backend(&self) -> &str {
        self.0
    }

    fn open(&self, _: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        Err(ModelError::Source("this build has not got it".into()))
    }
}

/// A CPU under another backend's name, for tests of its fallback.
struct Pretended {
    /// The other backend's name.
    name: String,
    /// The actual device.
    cpu: Arc<dyn Opener>,
}

impl Opener for Pretended {
    fn backend(&self) -> &str {
        &self.name
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let model = self.cpu.open(blueprint)?;
        let class = model.class().replacen("cpu", &self.name, 1);
        Ok(Box::new(Renamed { model, class }))
    }

    fn capacity(&self, blueprint: &Blueprint, most: usize) -> Result<Capacity, ModelError> {
        self.cpu.capacity(blueprint, most)
    }
}

struct Renamed {
    model: Box<dyn Model>,
    class: String,
}

impl Stage for Renamed {
    fn layout(&self) -> &Layout {
        self.model.layout()
    }

    fn class(&self) -> String {
        self.class.clone()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        self.model.set_parameters(flat)
    }

    fn forward(&mut self, batch: &Microbatch, input: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        self.model.forward(batch, input, want)
    }

    fn span(&self) -> Span {
        self.model.span()
    }

    fn longest_row(&self) -> usize {
        self.model.longest_row()
    }

    fn short_rows(&self) -> Option<usize> {
        self.model.short_rows()
    }

    fn backward(
        &mut self,
        ticket: Ticket,
        grad: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Fault> {
        self.model.backward(ticket, grad, gradient)
    }

    fn forget(&mut self, ticket: Ticket) {
        self.model.forget(ticket);
    }

    fn extend_all(&mut self, texts: &[(Session, &[u32])], input: Option<&[f32]>) -> Result<Output, Fault> {
        self.model.extend_all(texts, input)
    }

    fn end(&mut self, session: Session) {
        self.model.end(session);
    }

    fn gradient(&mut self, batch: &Microbatch, gradient: &mut [f32]) -> Result<LossSums, Fault> {
        self.model.gradient(batch, gradient)
    }

    fn traffic(&self) -> Traffic {
        self.model.traffic()
    }

    fn in_use(&mut self) -> Option<InUse> {
        self.model.in_use()
    }

    fn heed(&mut self, cancel: Cancel) {
        self.model.heed(cancel);
    }
}
