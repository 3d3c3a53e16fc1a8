//! Choice of devices from the options and the available hardware: a pure function, so that every error is testable
//! without the hardware. A software adapter is used only where it was named, because the CPU backend is faster. `auto`
//! takes CUDA where it has every card, else wgpu; without a card it takes the CPU and reports this. A missing backend that
//! was given by name is an error.

use super::drivers;
use super::visible::visible;
use crate::backend::Cpu;
use crate::backend::facts::{Facts, Kind};
use crate::config::groups::{CPU, ComputeDtype, DeviceOptions, Gpus, Part, Wanted};
use crate::config::refusal::Refusal;
use std::ops::Range;

/// A chosen device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picked {
    /// Name of the device in all messages.
    pub name: String,
    /// Identity of the device.
    pub device: DeviceId,
    /// Number of devices on the same adapter, including this one; they share its memory. Those of other processes count
    /// where the devices of a machine are shared (`--gpus 1/2`).
    pub sharing: usize,
}

/// Identity of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceId {
    /// Name of its driver.
    pub driver: &'static str,
    /// Its index among the driver's devices.
    pub index: usize,
}

/// Names of drivers of cards.
const CUDA: &str = "cuda";
const WGPU: &str = "wgpu";

impl DeviceId {
    /// This processor.
    const PROCESSOR: DeviceId = DeviceId { driver: CPU, index: 0 };
}

/// The chosen devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// At least one.
    pub picks: Vec<Picked>,
    /// Numbers of picks that hold a model together, in order: each is one device of the run.
    pub lines: Vec<usize>,
    /// Notes for a user who did not choose.
    pub notes: Vec<String>,
    /// The options as typed.
    pub options: DeviceOptions,
}

impl Chosen {
    /// Whether a single CPU is the only device.
    pub fn is_one_cpu(&self) -> bool {
        matches!(&self.picks[..], [Picked { device: DeviceId::PROCESSOR, .. }])
    }

    /// The picks of each device of the run.
    pub fn devices(&self) -> impl Iterator<Item = Range<usize>> {
        self.lines.iter().scan(0, |end, count| {
            let start = *end;
            *end += count;
            Some(start..*end)
        })
    }

    /// The picks of the first device of the run, where they hold a model together.
    pub fn first_line(&self) -> Option<Range<usize>> {
        self.devices().next().filter(|picks| picks.len() > 1)
    }
}

/// Chooses among the devices of this machine. If only the CPU was named, no driver is loaded.
pub fn choose(options: &DeviceOptions) -> Result<Chosen, Refusal> {
    let cpu = match &options.gpus {
        Gpus::None | Gpus::Cpu => true,
        Gpus::Named(wanted) => wanted.iter().all(Wanted::is_cpu),
        Gpus::Auto | Gpus::Share(_) => false,
    };
    let name = if cpu { CPU } else { options.backend.unwrap_or_else(|| automatic(options)) };
    let driver = drivers::named(name);
    let devices = if name == CPU { &[] } else { driver.devices() };
    let facts: Vec<&Facts> = devices.iter().map(|device| device.facts()).collect();
    #[cfg(feature = "faults")]
    let pretended = if name == CPU { Vec::new() } else { super::pretend::cards() };
    #[cfg(feature = "faults")]
    let facts: Vec<&Facts> = if pretended.is_empty() { facts } else { pretended.iter().collect() };
    let name = driver.name();
    #[cfg(feature = "faults")]
    let name = if pretended.is_empty() { name } else { super::pretend::DRIVER };
    let (seen, hiding) = match name {
        // It heeds the variables itself.
        CUDA => ((0..facts.len()).collect(), None),
        _ => visible(&facts, &|name| std::env::var(name).ok()),
    };
    let cards = Cards { driver: name, facts: &facts, seen, hiding, why: &|| driver.absence() };
    among(options, &cards)
}

/// The driver of `--gpu-backend auto`.
fn automatic(options: &DeviceOptions) -> &'static str {
    let facts = |name| drivers::named(name).devices().iter().map(|device| device.facts()).collect::<Vec<_>>();
    let cuda = facts(CUDA);
    if options.dtype == ComputeDtype::Portable || !are_new(&cuda) {
        return WGPU;
    }
    let all = facts(WGPU);
    let (seen, _) = visible(&all, &|name| std::env::var(name).ok());
    let seen: Vec<&Facts> = seen.into_iter().map(|at| all[at]).collect();
    if is_for_cuda(&options.gpus, &cuda, &seen) { CUDA } else { WGPU }
}

/// Whether NVIDIA's driver lists cards, all of them with the kernels that ran on a card: those of capability 8.0 and later.
fn are_new(cuda: &[&Facts]) -> bool {
    !cuda.is_empty() && cuda.iter().all(|facts| facts.has_bf16())
}

/// Whether CUDA has every card that is wanted of a machine: `cuda` and `wgpu` are its cards as both drivers list them.
/// Integrated cards of other vendors do not count, unless they are named.
fn is_for_cuda(gpus: &Gpus, cuda: &[&Facts], wgpu: &[&Facts]) -> bool {
    // A card of NVIDIA that its own driver does not list is hidden or broken.
    let others = || wgpu.iter().any(|facts| facts.kind == Kind::Discrete && !is_nvidia(facts));
    let has = |wanted: &Wanted| match wanted {
        Wanted::Part(part) => cuda.iter().any(|facts| is_named(facts, part)),
        Wanted::Index(index) => *index < cuda.len() && !others(),
        Wanted::Cpu | Wanted::Line(_) => true,
    };
    match gpus {
        Gpus::Named(wanted) => wanted.iter().flat_map(Wanted::seats).all(has),
        Gpus::Auto | Gpus::Share(_) => !others(),
        Gpus::None | Gpus::Cpu => true,
    }
}

/// Whether a part of a card's name, or of its driver's, was typed.
fn is_named(facts: &Facts, part: &str) -> bool {
    let has = |text: &str| text.to_lowercase().contains(&part.to_lowercase());
    has(&facts.name) || has(&facts.driver)
}

/// The cards of a driver.
struct Cards<'a> {
    driver: &'static str,
    facts: &'a [&'a Facts],
    /// Those that an engine gave to this process, and the setting that hides the others.
    seen: Vec<usize>,
    hiding: Option<String>,
    /// Why there are none, or no real ones.
    why: &'a dyn Fn() -> String,
}

/// Chooses among `cards`.
fn among(options: &DeviceOptions, cards: &Cards) -> Result<Chosen, Refusal> {
    let mut notes = Vec::new();
    let devices = match (&options.gpus, options.backend) {
        (Gpus::None | Gpus::Cpu, _) | (Gpus::Auto | Gpus::Share(_), Some(CPU)) => vec![processor("cpu")],
        (Gpus::Named(wanted), Some(CPU)) => {
            wanted.iter().flat_map(Wanted::seats).map(part_of_the_cpu).collect()
        }
        (Gpus::Auto | Gpus::Share(_), backend) => match (cards.physical(), backend) {
            (found, _) if !found.is_empty() => {
                let mine = part(options).range(found.len());
                found[mine].iter().map(|i| cards.named(*i)).collect()
            }
            (_, Some(backend)) => {
                return Err(refuse(format!("--gpu-backend {backend}: {}", cards.absence())));
            }
            (_, None) => {
                notes.push(cards.replaced());
                vec![processor("cpu")]
            }
        },
        (Gpus::Named(wanted), _) => {
            let seats = wanted.iter().flat_map(Wanted::seats);
            let found: Result<Vec<_>, _> = seats.map(|w| cards.find(w)).collect();
            found.map_err(refuse)?
        }
    };
    let facts = |id: DeviceId| cards.facts.get(id.index).filter(|_| id != DeviceId::PROCESSOR);
    if options.dtype == ComputeDtype::Bf16
        && let Some((_, name)) =
            devices.iter().find(|(id, _)| facts(*id).is_some_and(|facts| !facts.has_bf16()))
    {
        let why =
            format!("--dtype bf16: {name} has no bf16 arithmetic: leave --dtype out, or use --gpus cpu");
        return Err(refuse(why));
    }
    if options.dtype == ComputeDtype::Portable
        && let Some(why) = not_portable(cards.driver, &devices)
    {
        return Err(refuse(format!("--dtype portable: {why}")));
    }
    // A user may name a software adapter.
    let software = |id| facts(id).filter(|facts| facts.kind == Kind::Software);
    if let Some(Facts { name, .. }) = devices.iter().find_map(|(id, _)| software(*id)) {
        notes.push(format!("note: {name} is a software driver: --gpus cpu is faster"));
    }
    let untyped = options.backend.is_none();
    let nvidia = |id| facts(id).filter(|facts| untyped && is_nvidia(facts) && cards.driver != CUDA);
    if let Some(Facts { api, .. }) = devices.iter().find_map(|(id, _)| nvidia(*id)) {
        notes.push(format!(
            "note: the NVIDIA card computes through {api}; --gpu-backend cuda, which has NVIDIA's cards alone, may be faster"
        ));
    }
    let lines = match &options.gpus {
        Gpus::Named(wanted) => wanted.iter().map(|w| w.seats().len()).collect(),
        Gpus::Auto | Gpus::Share(_) | Gpus::None | Gpus::Cpu => vec![1; devices.len()],
    };
    let picks = shared(number_repeated(devices), part(options), cards);
    Ok(Chosen { picks, lines, notes, options: options.clone() })
}

/// Why the cards of this driver, or the processor if it is among the devices, are not of the portable class.
fn not_portable(driver: &str, devices: &[(DeviceId, String)]) -> Option<&'static str> {
    let processor = devices.iter().any(|(id, _)| *id == DeviceId::PROCESSOR);
    if processor && !Cpu::is_portable() {
        return Some("a multiply-add of this processor rounds twice: use f32, or a card");
    }
    (driver == CUDA).then_some("its kernels for CUDA are not written: leave --gpu-backend out, or use wgpu")
}

/// The part of the cards that this process takes, where it names none.
fn part(options: &DeviceOptions) -> Part {
    match options.gpus {
        Gpus::Share(part) => part,
        Gpus::Auto | Gpus::None | Gpus::Cpu | Gpus::Named(_) => Part { at: 0, of: 1 },
    }
}

/// Counts the processes that take the same cards, where there are several.
fn shared(mut picks: Vec<Picked>, part: Part, cards: &Cards) -> Vec<Picked> {
    if part.of > 1 {
        let found = cards.physical();
        for pick in picks.iter_mut().filter(|pick| pick.device != DeviceId::PROCESSOR) {
            let at = found.iter().position(|index| *index == pick.device.index).unwrap_or(0);
            pick.sharing = part.sharing(found.len(), at);
        }
    }
    picks
}

/// Whether NVIDIA's own driver drives the card: NVK, the driver of Mesa, excludes CUDA.
fn is_nvidia(facts: &Facts) -> bool {
    let has = |text: &str, part| text.to_lowercase().contains(part);
    has(&facts.name, "nvidia") && !has(&facts.name, "nvk") && !has(&facts.driver, "nvk")
}

fn refuse(line: String) -> Refusal {
    Refusal::configuration(line)
}

fn processor(name: &str) -> (DeviceId, String) {
    (DeviceId::PROCESSOR, name.into())
}

fn part_of_the_cpu(wanted: &Wanted) -> (DeviceId, String) {
    match wanted {
        Wanted::Index(index) => processor(&format!("cpu {index}")),
        Wanted::Cpu | Wanted::Part(_) | Wanted::Line(_) => processor("cpu"),
    }
}

impl Cards<'_> {
    /// Every physical card of this process once, under its first driver; without software adapters.
    fn physical(&self) -> Vec<usize> {
        let Cards { facts, seen, .. } = self;
        let first = |i: &usize| facts.iter().position(|f| f.card == facts[*i].card) == Some(*i);
        seen.iter().copied().filter(|i| facts[*i].kind != Kind::Software).filter(first).collect()
    }

    fn named(&self, index: usize) -> (DeviceId, String) {
        let Cards { driver, facts, .. } = *self;
        // Without additions of drivers: `llvmpipe (LLVM 15.0.6, 256 bits)`.
        let name = facts[index].name.split(" (").next().unwrap_or_default();
        (DeviceId { driver, index }, format!("{driver} {index} {name}"))
    }

    /// The note that the CPU computes because there is no card.
    fn replaced(&self) -> String {
        let why = self.hiding.as_ref().map(|hiding| format!("{hiding} leaves no card"));
        let why = why.unwrap_or("no GPU found (finetune devices says why)".into());
        format!("note: computes on the CPU: {why}")
    }

    /// Why there is no card, with a solution.
    fn absence(&self) -> String {
        if let Some(hiding) = &self.hiding {
            return format!("{hiding} leaves no card");
        }
        let why = (self.why)();
        match self.facts {
            [] => format!("no GPU: {why}"),
            [software, ..] => format!(
                "no GPU but {}, a software driver, which is slower than the CPU backend and used only if --gpus names \
                 it: {why}",
                software.name,
            ),
        }
    }

    fn find(&self, wanted: &Wanted) -> Result<(DeviceId, String), String> {
        let Cards { facts, why, .. } = self;
        let unknown = |what: String| {
            let names = (0..facts.len()).map(|i| format!("device {i} {}", facts[i].name));
            Err(format!("--gpus: {what}; what there is: {}", names.collect::<Vec<_>>().join(", ")))
        };
        match wanted {
            Wanted::Cpu | Wanted::Line(_) => Ok(processor("cpu")),
            Wanted::Index(index) if *index < facts.len() => Ok(self.named(*index)),
            _ if facts.is_empty() => Err(format!("--gpus: no GPU: {} (the CPU is --gpus cpu)", why())),
            Wanted::Index(index) => unknown(format!("there is no device {index}")),
            Wanted::Part(part) => {
                let mut matching: Vec<usize> =
                    (0..facts.len()).filter(|i| is_named(facts[*i], part)).collect();
                // A card with two drivers counts once.
                if matching.iter().all(|i| facts[*i].card == facts[matching[0]].card) {
                    matching.truncate(1);
                }
                match matching[..] {
                    [] => unknown(format!("no device has {part:?} in its name")),
                    [one] => Ok(self.named(one)),
                    _ => {
                        let names = matching.iter().map(|i| format!("{i} {}", facts[*i].name));
                        let names = names.collect::<Vec<_>>().join(" and ");
                        Err(format!("--gpus: {part:?} matches {names}: give the index"))
                    }
                }
            }
        }
    }
}

/// Numbers the names of a device that was given twice, because it counts as two devices.
fn number_repeated(devices: Vec<(DeviceId, String)>) -> Vec<Picked> {
    let picked = |(at, (device, name)): (usize, &(DeviceId, String))| {
        let sharing = devices.iter().filter(|(other, _)| other == device).count();
        let nth = 1 + devices[..at].iter().filter(|(_, other)| other == name).count();
        let name = if nth > 1 { format!("{name} ({nth})") } else { name.clone() };
        Picked { name, device: *device, sharing }
    };
    devices.iter().enumerate().map(picked).collect()
}

#[cfg(test)]
mod tests;
