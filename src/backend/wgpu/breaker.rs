//! A device that is lost on purpose. Drivers reset cards that hang, laptops unplug them; tests do it through here, and
//! everything after it takes the way of the real thing: handlers, latch, fault.

use super::Wgpu;

/// Takes a device away.
#[derive(Debug, Clone)]
pub struct Breaker(wgpu::Device);

impl Breaker {
    /// From now on the device computes nothing.
    pub fn strike(&self) {
        self.0.destroy();
    }
}

impl Wgpu {
    /// What could take this device away.
    pub fn breaker(&self) -> Breaker {
        Breaker(self.gpu.device.clone())
    }
}
