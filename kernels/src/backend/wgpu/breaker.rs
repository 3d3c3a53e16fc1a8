//! Simulates the loss of a device. Drivers reset cards that hang, and laptops unplug them. Everything after the
//! simulated loss takes the same path as after a real one: handlers, latch, fault.

use super::Wgpu;
use super::device::{Call, Gpu, Op};
use super::kernel::Kernel;
use crate::backend::Checked;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Disables a device.
#[derive(Debug, Clone)]
pub struct Breaker(wgpu::Device, Arc<AtomicBool>, Arc<Mutex<Option<Harm>>>);

/// What happens to a submission that its driver reports as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// Nothing of it runs.
    Dropped,
    /// Its first half runs.
    Truncated,
    /// It runs twice.
    Repeated,
}

impl Breaker {
    /// From now on the device computes nothing.
    pub fn strike(&self) {
        self.0.destroy();
    }

    /// Makes polling panic, which is how wgpu reports the loss for most drivers.
    pub fn vanish(&self) {
        self.1.store(true, Ordering::Relaxed);
    }

    /// Harms the next submission.
    pub fn harm(&self, harm: Harm) {
        *self.2.lock().unwrap_or_else(PoisonError::into_inner) = Some(harm);
    }
}

/// A kernel that no compiler accepts.
static BROKEN: Kernel = Kernel { name: "broken", source: &["fn main( {"], buffers: &[] };

impl Checked<Wgpu> {
    /// Records a kernel that no driver compiles.
    pub fn refuse(&mut self) {
        let call = Call { kernel: &BROKEN, constants: &[], params: &[], slots: &[], groups: 1, work: 1.0 };
        self.gpu.dispatch(call);
    }
}

impl Gpu {
    /// The operations of a submission, each list for one command buffer.
    pub(super) fn lists<'a>(&self, ops: &'a [Op]) -> Vec<&'a [Op]> {
        match self.harm.lock().unwrap_or_else(PoisonError::into_inner).take() {
            None => vec![ops],
            Some(Harm::Dropped) => vec![],
            Some(Harm::Truncated) => vec![&ops[..ops.len() / 2]],
            Some(Harm::Repeated) => vec![ops, ops],
        }
    }
}

impl Wgpu {
    /// The breaker of this device.
    pub fn breaker(&self) -> Breaker {
        Breaker(self.gpu.device.clone(), self.gpu.gone.clone(), self.gpu.harm.clone())
    }
}
