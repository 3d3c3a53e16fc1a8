//! The devices of a process, one thread each. They outlive a conversation: a worker that reconnects continues with
//! the models that it has loaded.

use super::blueprint::{Begin, Blueprint, Candidate, Opener, Shape};
use super::device::{Buffers, DeviceWorker, Shared};
use super::device_queue::{DeviceQueue, QueuedLease};
use super::limits::Limits;
use super::selftest::Reference;
use super::sum::Devices;
use crate::cluster::inject::Inject;
use crate::cluster::message::{Capacity, Device, LeaseId, Trials};
use crate::support::panics::caught;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// The devices and settings of a worker process.
#[derive(Clone)]
pub struct Equipment {
    /// Its devices.
    pub candidates: Vec<Candidate>,
    /// The backend that every device is compared with in the self-test.
    pub reference: Arc<dyn Opener>,
    /// Injected faults, for tests.
    pub inject: Inject,
}

impl Equipment {
    /// What the only device can hold as a seat of a line of up to `most` seats. The error is one line.
    pub(super) fn capacity(&self, blueprint: &Blueprint, most: usize) -> Result<Capacity, String> {
        let mut why = "there is no device".into();
        for candidate in &self.candidates {
            let backends = if candidate.begin == Begin::Named { 1 } else { candidate.chain.len() };
            for opener in candidate.chain.iter().take(backends) {
                match opener.capacity(blueprint, most) {
                    Ok(capacity) => {
                        let (layer, head) = capacity.seconds;
                        let slow = self.inject.slow().unwrap_or(1.0);
                        let (seconds, reading) = ((layer * slow, head * slow), capacity.reading * slow);
                        return Ok(Capacity { seconds, reading, ..capacity });
                    }
                    Err(e) => why = format!("{}: {e}", candidate.name),
                }
            }
        }
        Err(why)
    }
}

/// The opened devices.
pub(super) struct DeviceThreads {
    /// The model hash and shape that they were built for.
    pub of: (String, Shape),
    pub devices: Vec<Device>,
    pub refused: Vec<String>,
    /// Messages from opening the devices.
    pub lines: Vec<String>,
    pub buffers: Buffers,
    pub limits: Limits,
    queues: Vec<Arc<DeviceQueue>>,
    /// The trials of each device when it was opened.
    measured: Vec<Trials>,
    /// Most values of the hidden states of a microbatch or a prompt.
    hidden_values: usize,
    too_large: Arc<AtomicBool>,
}

/// A ready device with the messages from opening it, or why it cannot be used.
type Opened = Result<(Device, Arc<DeviceQueue>, Vec<String>, Trials), String>;

impl DeviceThreads {
    /// Opens all devices at the same time. A device that fails is a line in `refused`, not an error.
    pub fn open(equipment: &Equipment, model: &str, blueprint: Blueprint) -> Self {
        let of = (model.to_string(), blueprint.shape.clone());
        let (tokens, positions) = (of.1.tokens, blueprint.config.max_positions);
        let limits = Limits { tokens, positions, moments: of.1.moments };
        let longest = limits.tokens.max(limits.positions);
        let hidden_values = longest.saturating_mul(blueprint.config.hidden);
        let (buffers, mut refused) = (Buffers::default(), Vec::new());
        let (mut devices, mut queues, mut lines) = (Vec::new(), Vec::new(), Vec::new());
        let (mut measured, too_large) = (Vec::new(), Arc::default());
        match Reference::new(&*equipment.reference) {
            Err(e) => refused.push(format!("the self-test's reference cannot be computed: {e}")),
            Ok(reference) => {
                let reference = reference.typed(blueprint.shape.dtype.clone());
                let shared = Shared {
                    blueprint: Arc::new(blueprint),
                    reference: Arc::new(reference),
                    inject: equipment.inject.clone(),
                    buffers: buffers.clone(),
                    too_large: Arc::clone(&too_large),
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
        DeviceThreads {
            of,
            devices,
            refused,
            lines,
            buffers,
            limits,
            queues,
            measured,
            hidden_values,
            too_large,
        }
    }

    /// Whether the device ran out of memory as a seat of a line.
    pub fn too_large(&self) -> bool {
        self.too_large.load(Ordering::Acquire)
    }

    /// Updates the devices for a new conversation: a device that fell back since the last one is listed as it is
    /// now, and one that has gone down is refused with the reason.
    pub fn mustered(mut self) -> Self {
        let before = std::mem::take(&mut self.devices).into_iter().zip(std::mem::take(&mut self.measured));
        for ((before, trials), queue) in before.zip(std::mem::take(&mut self.queues)) {
            match queue.muster() {
                Ok(device) => {
                    // Measurements of the previous backend do not apply to the current one.
                    self.measured.push(if device == before { trials } else { Trials::default() });
                    self.devices.push(device);
                    self.queues.push(queue);
                }
                Err(reason) => self.refused.push(format!("{}: {reason}", before.name)),
            }
        }
        self
    }

    /// The trials of each device.
    pub fn measured(&self) -> Vec<Trials> {
        self.measured.clone()
    }

    /// The last reason if every device has gone down, else `None`.
    pub fn spent(&self) -> Option<String> {
        let reasons: Option<Vec<String>> = self.queues.iter().map(|queue| queue.gone()).collect();
        reasons.and_then(|reasons| reasons.into_iter().next_back())
    }

    /// Gives a device a lease. Returns false if there is no such device any more.
    pub fn put(&self, device: u16, job: QueuedLease) -> bool {
        self.queues.get(usize::from(device)).is_some_and(|queue| queue.put(job))
    }

    /// A lease is not taken: hidden states that come for it are not waited for.
    pub fn passes_over(&self, device: u16, lease: LeaseId) {
        if let Some(queue) = self.queues.get(usize::from(device)) {
            queue.passes_over(lease);
        }
    }

    /// The lease that a device computes.
    pub fn running(&self, device: u16) -> Option<LeaseId> {
        self.queues.get(usize::from(device)).and_then(|queue| queue.running())
    }

    /// Whether a lease that a device computes was called back.
    pub fn is_called_back(&self, device: u16, lease: LeaseId) -> bool {
        self.queues.get(usize::from(device)).is_some_and(|queue| queue.is_called_back(lease))
    }

    /// The queue of the only device, and most values of a microbatch's hidden states, if it is a seat of a line.
    pub fn seat(&self) -> Option<(&Arc<DeviceQueue>, usize)> {
        let portion = self.of.1.portion.as_ref();
        portion.and_then(|_| self.queues.first()).map(|queue| (queue, self.hidden_values))
    }

    /// Whether gradients are rounded to few bits.
    pub fn rounds(&self) -> bool {
        self.of.1.sum_bits > 0
    }

    /// Number of parameters before the newest that a conversation keeps.
    pub fn delay(&self) -> u64 {
        self.of.1.delay
    }

    /// The number of leases that a device computes at the same time.
    pub fn together(&self, device: u16) -> u16 {
        self.queues.get(usize::from(device)).map_or(1, |queue| queue.together())
    }

    /// Whether any device computes a lease.
    pub fn busy(&self) -> Devices {
        let busy = self.queues.iter().any(|queue| queue.running().is_some());
        if busy { Devices::Busy } else { Devices::Idle }
    }

    /// Cancels a lease on the device that holds it. Returns true if it had not been started.
    pub fn take_away(&self, lease: LeaseId) -> bool {
        self.queues.iter().any(|queue| queue.take_away(lease))
    }

    /// Cancels all leases and returns their numbers.
    pub fn clear(&self) -> Vec<LeaseId> {
        self.queues.iter().flat_map(|queue| queue.clear()).collect()
    }
}

impl Drop for DeviceThreads {
    fn drop(&mut self) {
        self.queues.iter().for_each(|queue| queue.close());
    }
}

/// Starts one thread for each candidate; the results are in the candidates' order. Each lease carries the device's
/// index, because the index is the position among the devices that are ready.
fn start(candidates: &[Candidate], shared: &Shared) -> Vec<Opened> {
    let (opened, results) = mpsc::channel::<(usize, Opened)>();
    for (i, candidate) in candidates.iter().enumerate() {
        let (opened, shared, candidate) = (opened.clone(), shared.clone(), candidate.clone());
        let open = move || {
            let queue = Arc::new(DeviceQueue::default());
            match DeviceWorker::open(candidate, queue.clone(), shared) {
                Ok((mut worker, lines)) => {
                    // A panic here occurs again in the first lease, where it is handled.
                    let trials = caught(|| worker.measure()).unwrap_or_default();
                    let device = worker.device();
                    queue.stands(device.clone());
                    let sent = opened.send((i, Ok((device, queue, lines, trials))));
                    drop(opened);
                    // Without a receiver no conversation can give it work.
                    if sent.is_ok() {
                        worker.work();
                    }
                }
                Err(line) => drop(opened.send((i, Err(line)))),
            }
        };
        let name = format!("device-{i}");
        // If the system gives no thread, the candidate never reports, and the default error below remains.
        let _ = std::thread::Builder::new().name(name).spawn(open);
    }
    drop(opened);
    let mut found: Vec<_> =
        candidates.iter().map(|c| Err(format!("{}: could not be opened", c.name))).collect();
    results.into_iter().for_each(|(i, result)| found[i] = result);
    found
}
