//! The first error of a device. wgpu reports errors through handlers, some of them on other threads. The first error is
//! latched with the verb that was being recorded or encoded; all later errors are consequences. A device with a latched
//! fault records nothing more, and every read of it returns that fault.

use crate::backend::Fault;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The latch, shared with the handlers of a device.
#[derive(Debug, Clone)]
pub struct Faults(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: String,
    raised: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    first: Option<Fault>,
    /// The loss of the device, which takes precedence over faults reported before it.
    lost: Option<Fault>,
    verb: &'static str,
    /// Bytes of the buffer that is being made.
    wanted: u64,
}

impl Faults {
    /// An empty latch of the device with this name.
    pub fn new(device: String) -> Faults {
        Faults(Arc::new(Inner { device, raised: AtomicBool::new(false), state: Mutex::default() }))
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.0.device
    }

    /// Makes the handlers of `device` latch here.
    pub fn watch(&self, device: &wgpu::Device) {
        let own = self.clone();
        device.on_uncaptured_error(Arc::new(move |error| match error {
            wgpu::Error::OutOfMemory { .. } => own.out_of_memory(),
            wgpu::Error::Validation { description, .. } => own.raise(&one_line(&description)),
            wgpu::Error::Internal { description, .. } => own.raise(&one_line(&description)),
        }));
        let own = self.clone();
        device.set_device_lost_callback(move |reason, message| {
            // Dropping a device reports `destroyed` too, but then no reader remains.
            own.lost(&format!("({reason:?}): {message}"));
        });
    }

    /// Latches the loss of the device.
    pub fn lost(&self, why: &str) {
        let reason = format!("the device was lost: {}", one_line(why));
        let device = self.0.device.clone();
        self.state().lost.get_or_insert(Fault::Device { device, reason });
        self.0.raised.store(true, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the verb that is named in later faults.
    pub fn doing(&self, verb: &'static str) {
        self.state().verb = verb;
    }

    /// Sets the size of the buffer that is being made.
    pub fn wanting(&self, bytes: u64) {
        self.state().wanted = bytes;
    }

    /// Latches a reason, unless a fault is already latched.
    pub fn raise(&self, reason: &str) {
        let mut state = self.state();
        let reason = match state.verb {
            "" => reason.to_string(),
            verb => format!("{verb}: {reason}"),
        };
        let device = self.0.device.clone();
        state.first.get_or_insert(Fault::Device { device, reason });
        self.0.raised.store(true, Ordering::Release);
    }

    /// Latches that memory for the buffer is not available.
    pub fn out_of_memory(&self) {
        let mut state = self.state();
        let fault = Fault::OutOfMemory { device: self.0.device.clone(), needed: state.wanted };
        state.first.get_or_insert(fault);
        self.0.raised.store(true, Ordering::Release);
    }

    /// Clears and returns the latched fault: a variant that a driver refuses is no fault of the device. The loss of a
    /// device is not cleared.
    pub fn forgive(&self) -> Option<Fault> {
        let mut state = self.state();
        self.0.raised.store(state.lost.is_some(), Ordering::Release);
        state.first.take()
    }

    /// Whether the latched fault is a lack of memory.
    pub fn is_memory(&self) -> bool {
        let state = self.state();
        state.lost.is_none() && matches!(state.first, Some(Fault::OutOfMemory { .. }))
    }

    /// Whether a fault is latched.
    pub fn raised(&self) -> bool {
        self.0.raised.load(Ordering::Acquire)
    }

    /// Returns the latched fault as an error.
    pub fn check(&self) -> Result<(), Fault> {
        if !self.raised() {
            return Ok(());
        }
        let state = self.state();
        state.lost.clone().or(state.first.clone()).map_or(Ok(()), Err)
    }
}

/// A driver's message on one line of limited length.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ");
    match line.char_indices().nth(400) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line,
    }
}
