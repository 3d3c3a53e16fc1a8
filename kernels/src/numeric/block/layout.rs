//! The layout of codes and scales in a block, for kernels that load codes of several rows at once and shift them into
//! place themselves. It describes the same format as [`super::Packed::codes`] and [`super::Packed::scales`]; tests
//! compare every kernel that uses it with those functions.

/// Codes of 32 values in two parts of 32 bytes each: code = (low | high << `up`) - `less`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Split {
    /// Bits of the lower part.
    pub low: Bits,
    /// Bits of the upper part.
    pub high: Bits,
    /// Shift of the upper part.
    pub up: u32,
    /// Offset that is subtracted.
    pub less: i8,
}

/// A bit field in each of 32 bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bits {
    /// First byte.
    pub at: usize,
    /// Number of bits below the field.
    pub down: usize,
    /// Mask of the field after the shift.
    pub mask: u8,
}

/// Layout of the codes in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeLayout {
    /// In two parts; see [`super::Packed::split`].
    Split,
    /// One byte per code.
    Bytes {
        /// First byte.
        at: usize,
    },
    /// Sixteen bytes per run: the first sixteen values in the lower nibbles, the others in the upper nibbles.
    Halves {
        /// First byte.
        at: usize,
        /// Offset that is subtracted from a 4-bit value.
        less: i8,
    },
    /// Same as `Halves`, with a fifth bit of each value in a 32-bit word.
    Fifths {
        /// First byte.
        at: usize,
        /// First byte of the fifth bits.
        bits: usize,
        /// Offset that is subtracted from a 5-bit value.
        less: i8,
    },
    /// Same as `Halves`; a 4-bit value selects a level.
    Table {
        /// First byte.
        at: usize,
        /// The codes of [`super::Packed::codes`].
        levels: [i8; 16],
    },
    /// Sixteen bytes per run: two values per byte, the first one in the upper nibble.
    Pairs {
        /// First byte.
        at: usize,
    },
    /// 32 bytes for two runs: the first run in the lower nibbles.
    Planes {
        /// First byte.
        at: usize,
    },
}

/// Layout of the scales in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// Computed by [`super::Packed::scales`].
    Computed,
    /// One f32.
    Float,
    /// One byte e: 2^(e - 128).
    Exponent,
    /// One f16.
    Half,
    /// Two f16: the scale, and an offset that is added.
    Halves,
    /// One signed byte for every sixteen values, from byte `at`, followed by an f16.
    Signed {
        /// First byte.
        at: usize,
    },
    /// Two f16 (scale and minimum), and for each run a 6-bit factor of both, in twelve bytes: the second product is
    /// subtracted.
    SixBits,
}

impl Scales {
    /// Whether an offset is added.
    pub const fn add(self) -> bool {
        !matches!(self, Scales::Float | Scales::Exponent | Scales::Half | Scales::Signed { .. })
    }
}
