//! Facts about devices, for users and for their choice: the same form under every driver.

use std::collections::BTreeMap;

/// Kinds of devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kind {
    /// This processor, without a driver.
    Cpu,
    /// A card with its own memory.
    Discrete,
    /// A part of the processor that uses the machine's memory.
    Integrated,
    /// A part of a card, given to a virtual machine.
    Virtual,
    /// The driver does not say.
    #[default]
    Unknown,
    /// A driver that computes on the processor: slower than the CPU backend.
    Software,
}

impl Kind {
    /// The kind in one word.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Cpu => "cpu",
            Kind::Discrete => "discrete",
            Kind::Integrated => "integrated",
            Kind::Virtual => "virtual",
            Kind::Unknown => "unknown",
            Kind::Software => "software",
        }
    }
}

/// Facts about a device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Facts {
    /// The driver's spelling.
    pub name: String,
    /// The kind of device.
    pub kind: Kind,
    /// `vulkan`, `metal`, `dx12`, `cuda`; empty for the CPU.
    pub api: String,
    /// Driver and its version.
    pub driver: String,
    /// PCI address; empty if unknown.
    pub pci: String,
    /// The key of the physical card, equal for all its drivers.
    pub card: String,
    /// Features that kernels may use.
    pub features: Vec<String>,
    /// Limits for kernels.
    pub limits: BTreeMap<&'static str, u64>,
}

/// Feature of a card whose tensor cores multiply bf16 numbers.
pub const BF16: &str = "bf16";

impl Facts {
    /// Whether the device rounds factors of products to bf16 where this is asked for.
    pub fn has_bf16(&self) -> bool {
        self.kind == Kind::Cpu || self.features.iter().any(|feature| feature == BF16)
    }
}
