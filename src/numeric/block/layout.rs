//! Where a block has its codes and scales, for kernels that take those of several rows at a time and shift them into place
//! by themselves. It says again what [`super::Packed::codes`] and [`super::Packed::scales`] do; whoever uses it is
//! compared with those.

/// Codes of 32 numbers in 32 bytes and more bits in 32 others: low | high << `up`, less `less`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Split {
    /// The lower bits.
    pub low: Bits,
    /// Those above them.
    pub high: Bits,
    /// By how much.
    pub up: u32,
    /// What that is more than the code.
    pub less: i8,
}

/// Some bits of 32 bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bits {
    /// First byte.
    pub at: usize,
    /// How many bits lie below them.
    pub down: usize,
    /// Ones where they are, once those are gone.
    pub mask: u8,
}

/// Where the codes of a block are, from its byte `at` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeLayout {
    /// In two parts, as [`super::Packed::split`] says.
    Split,
    /// A byte for each.
    Bytes {
        /// First byte.
        at: usize,
    },
    /// Sixteen bytes for a run: its first sixteen numbers in the lower bits, the others in the upper ones.
    Halves {
        /// First byte.
        at: usize,
        /// What four bits are more than their code.
        less: i8,
    },
    /// The same, and 32 bits above them.
    Fifths {
        /// First byte.
        at: usize,
        /// First byte of the bits.
        bits: usize,
        /// What five bits are more than their code.
        less: i8,
    },
    /// Sixteen bytes for a run: two numbers in each byte, the first in the upper bits.
    Pairs {
        /// First byte.
        at: usize,
    },
    /// 32 bytes for two runs: the first in the lower bits.
    Planes {
        /// First byte.
        at: usize,
    },
}

/// How the scales of a block lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// [`super::Packed::scales`] makes them.
    Computed,
    /// An f32.
    Float,
    /// A half.
    Half,
    /// A half, and another one that is added.
    Halves,
    /// A signed byte for every sixteen numbers, from byte `at` on, and a half behind the last of them.
    Signed {
        /// First byte.
        at: usize,
    },
    /// Two halves, and in twelve bytes six bits for each run of both: the second product is subtracted.
    SixBits,
}

impl Scales {
    /// Whether anything is added.
    pub const fn add(self) -> bool {
        !matches!(self, Scales::Float | Scales::Half | Scales::Signed { .. })
    }
}
