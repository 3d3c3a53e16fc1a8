//! The devices of a process, each on a thread of its own. They outlive a conversation: a worker whose coordinator
//! comes back goes on with the models that it has loaded.

use super::blueprint::{Blueprint, Candidate, Opener, Shape};
use super::device::{Buffers, DeviceWorker, Settled, Shared};
use super::device_queue::{DeviceQueue, QueuedLease};
use super::limits::Limits;
use super::selftest::Reference;
use super::sum::Devices;
use crate::cluster::inject::Inject;
use crate::cluster::message::{Device, LeaseId, Trials};
use crate::support::panics::caught;
use std::sync::{Arc, mpsc};

/// What a process has to compute with.
#[derive(Clone)]
pub struct Equipment {
    /// Its devices.
    pub candidates: Vec<Candidate>,
    /// What every one of them is compared with before it takes part.
    pub reference: Arc<dyn Opener>,
    /// Faults on purpose.
    pub inject: Inject,
}

/// Devices that are ready, each with the queue of its thread.
pub(super) struct DeviceThreads {
    /// What they were built for: model and shape.
    pub of: (String, Shape),
    pub devices: Vec<Device>,
    pub refused: Vec<String>,
    /// What happened while they were opened.
    pub lines: Vec<String>,
    pub buffers: Buffers,
    pub limits: Limits,
    queues: Vec<Arc<DeviceQueue>>,
    /// What each was measured to need when it was opened.
    measured: Vec<Trials>,
}

/// A device that is ready and what happened on the way, or why there is none.
type Opened = Result<(Device, Arc<DeviceQueue>, Vec<String>, Trials), String>;

impl DeviceThreads {
    /// Opens all devices at the same time; none of them is an error here, but a line in `refused`.
    pub fn open(equipment: &Equipment, model: &str, blueprint: Blueprint) -> Self {
        let of = (model.to_string(), blueprint.shape.clone());
        let limits = Limits { tokens: of.1.tokens, positions: blueprint.config.max_positions };
        let (buffers, mut refused) = (Buffers::default(), Vec::new());
        let (mut devices, mut queues, mut lines) = (Vec::new(), Vec::new(), Vec::new());
        let mut measured = Vec::new();
        match Reference::new(&*equipment.reference) {
            Err(e) => refused.push(format!("the self-test's reference cannot be computed: {e}")),
            Ok(reference) => {
                let reference = reference.typed(blueprint.shape.dtype.clone());
                let shared = Shared {
                    blueprint: Arc::new(blueprint),
                    reference: Arc::new(reference),
                    inject: equipment.inject.clone(),
                    buffers: buffers.clone(),
                };
                for opened in start(&equipment.candidates, &shared) {
                    match opened {
                        Ok((device, queue, said, trials)) => {
                            measured.push(trials);
                            devices.push(device);
                            queues.push(queue);
                            lines.extend(said);
                        }
                        Err(line) => refused.push(line),
                    }
                }
            }
        }
        DeviceThreads { of, devices, refused, lines, buffers, limits, queues, measured }
    }

    /// What stands, for a conversation that begins: what a device has become since the last one counts, and one
    /// that has gone down is refused with the reason.
    pub fn mustered(mut self) -> Self {
        let before = std::mem::take(&mut self.devices).into_iter().zip(std::mem::take(&mut self.measured));
        for ((before, trials), queue) in before.zip(std::mem::take(&mut self.queues)) {
            match queue.muster() {
                Ok(device) => {
                    // What it was before it fell back says nothing of what it is now.
                    self.measured.push(if device == before { trials } else { Trials::default() });
                    self.devices.push(device);
                    self.queues.push(queue);
                }
                Err(reason) => self.refused.push(format!("{}: {reason}", before.name)),
            }
        }
        self
    }

    /// What each device was measured to need.
    pub fn measured(&self) -> Vec<Trials> {
        self.measured.clone()
    }

    /// Why none of the devices that it had stands any more.
    pub fn spent(&self) -> Option<String> {
        let reasons: Option<Vec<String>> = self.queues.iter().map(|queue| queue.gone()).collect();
        reasons.and_then(|reasons| reasons.into_iter().next_back())
    }

    /// Gives a device a lease; false where there is none of that index any more.
    pub fn put(&self, device: u16, job: QueuedLease) -> bool {
        self.queues.get(usize::from(device)).is_some_and(|queue| queue.put(job))
    }

    /// The lease that a device works on.
    pub fn running(&self, device: u16) -> Option<LeaseId> {
        self.queues.get(usize::from(device)).and_then(|queue| queue.running())
    }

    /// Whether any device works on something.
    pub fn busy(&self) -> Devices {
        let busy = self.queues.iter().any(|queue| queue.running().is_some());
        if busy { Devices::Busy } else { Devices::Idle }
    }

    /// Takes a lease away from whoever has it; true where it had not been begun.
    pub fn take_away(&self, lease: LeaseId) -> bool {
        self.queues.iter().any(|queue| queue.take_away(lease))
    }

    /// Takes everything away; the leases' numbers.
    pub fn clear(&self) -> Vec<LeaseId> {
        self.queues.iter().flat_map(|queue| queue.clear()).collect()
    }
}

impl Drop for DeviceThreads {
    fn drop(&mut self) {
        self.queues.iter().for_each(|queue| queue.close());
    }
}

/// One thread for each candidate; results in their order. What a device is called is in each lease, because its
/// index is its place among those that stand.
fn start(candidates: &[Candidate], shared: &Shared) -> Vec<Opened> {
    let (opened, results) = mpsc::channel::<(usize, Opened)>();
    for (i, candidate) in candidates.iter().enumerate() {
        let (opened, shared, candidate) = (opened.clone(), shared.clone(), candidate.clone());
        let open = move || {
            let queue = Arc::new(DeviceQueue::default());
            match DeviceWorker::open(candidate, queue.clone(), shared) {
                Ok((mut worker, lines)) => {
                    // A panic in it is found again by the first lease, where it has consequences.
                    let mut trials = caught(|| worker.measure()).unwrap_or_default();
                    match worker.settle(&trials.memory) {
                        Err(line) => return drop(opened.send((i, Err(line)))),
                        Ok(Settled::Again) => trials = caught(|| worker.measure()).unwrap_or_default(),
                        Ok(Settled::Stands) => {}
                    }
                    let device = worker.device();
                    queue.stands(device.clone());
                    let told = opened.send((i, Ok((device, queue, lines, trials))));
                    drop(opened);
                    // Nobody who knows of it: nobody who would give it work.
                    if told.is_ok() {
                        worker.work();
                    }
                }
                Err(line) => drop(opened.send((i, Err(line)))),
            }
        };
        let name = format!("device-{i}");
        // Where the system gives no thread the candidate never reports, and is said to be so below.
        let _ = std::thread::Builder::new().name(name).spawn(open);
    }
    drop(opened);
    let mut found: Vec<_> =
        candidates.iter().map(|c| Err(format!("{}: could not be opened", c.name))).collect();
    results.into_iter().for_each(|(i, result)| found[i] = result);
    found
}
