//! A device that is lost on purpose. Drivers reset cards that hang, laptops unplug them; tests do it through here, and
//! everything after it takes the way of the real thing: handlers, latch, fault.

use super::Wgpu;
use super::device::Call;
use super::kernel::Kernel;
use crate::backend::Checked;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Takes a device away.
#[derive(Debug, Clone)]
pub struct Breaker(wgpu::Device, Arc<AtomicBool>);

impl Breaker {
    /// From now on the device computes nothing.
    pub fn strike(&self) {
        self.0.destroy();
    }

    /// The same as most drivers do it: wgpu knows no way to say it but a panic.
    pub fn vanish(&self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

/// Text that no compiler takes.
static BROKEN: Kernel = Kernel { name: "broken", source: &["fn main( {"], buffers: &[] };

impl Checked<Wgpu> {
    /// Records a kernel that no driver compiles.
    pub fn refuse(&mut self) {
        let call = Call { kernel: &BROKEN, constants: &[], params: &[], slots: &[], groups: 1, work: 1.0 };
        self.gpu.dispatch(call);
    }
}

impl Wgpu {
    /// What could take this device away.
    pub fn breaker(&self) -> Breaker {
        Breaker(self.gpu.device.clone(), self.gpu.gone.clone())
    }
}
