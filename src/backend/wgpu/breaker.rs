//! Simulates the loss of a device. Drivers reset cards that hang, and laptops unplug them. Everything after the
//! simulated loss takes the same path as after a real one: handlers, latch, fault.

use super::Wgpu;
use super::device::Call;
use super::kernel::Kernel;
use crate::backend::Checked;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Disables a device.
#[derive(Debug, Clone)]
pub struct Breaker(wgpu::Device, Arc<AtomicBool>);

impl Breaker {
    /// From now on the device computes nothing.
    pub fn strike(&self) {
        self.0.destroy();
    }

    /// Makes polling panic, which is how wgpu reports the loss for most drivers.
    pub fn vanish(&self) {
        self.1.store(true, Ordering::Relaxed);
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

impl Wgpu {
    /// The breaker of this device.
    pub fn breaker(&self) -> Breaker {
        Breaker(self.gpu.device.clone(), self.gpu.gone.clone())
    }
}
