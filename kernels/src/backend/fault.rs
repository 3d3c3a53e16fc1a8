//! What a device may answer instead of a result: the one error of this floor.

/// A device that did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Memory could not be had.
    #[error("{device}: out of memory: {needed} bytes needed")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Bytes that were asked for.
        needed: u64,
    },
    /// The device, its driver or a kernel failed.
    #[error("{device}: {reason}")]
    Device {
        /// The device's name.
        device: String,
        /// What it said.
        reason: String,
    },
    /// The caller wanted no result any more, and said so through its cancel flag.
    #[error("cancelled")]
    Cancelled,
    /// What was asked for is not finite.
    #[error(
        "{device}: {what} became {value}: the weights, the adapter or the learning rate make numbers too large"
    )]
    NonFinite {
        /// The device's name, or its class.
        device: String,
        /// Which value.
        what: String,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
}
