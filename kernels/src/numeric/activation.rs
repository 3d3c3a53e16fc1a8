//! The activations of gated feed-forwards and gates.

/// The function of gate and up that gives the input of the down projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// silu(gate) * up.
    SwiGlu,
    /// gelu(gate) * up, with gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))).
    GeGlu,
    /// sigmoid(gate) * up: the gate of an attention's output; of no feed-forward.
    Sigmoid,
    /// g sigmoid([`CLAMPED_SLOPE`] g) (u + 1), with g = min(gate, [`CLAMPED_LIMIT`]) and u = up within that limit on both
    /// sides (gpt-oss).
    ClampedSwiGlu,
}

/// Factor of the gate in the sigmoid of [`Activation::ClampedSwiGlu`].
pub const CLAMPED_SLOPE: f32 = 1.702;
/// Largest gate, and largest magnitude of up, of [`Activation::ClampedSwiGlu`].
pub const CLAMPED_LIMIT: f32 = 7.0;
