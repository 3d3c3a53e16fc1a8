//! Floor 2: the verbs of a decoder, each with its gradient beside it.
//!
//! A backend is memory plus verbs on 2-D row-major views whose rows are tokens. Verbs enqueue and return
//! nothing; a fault surfaces at [`Backend::read`]. Every verb says what it writes: `=` overwrites, `+=` adds,
//! and where the caller may choose it passes a [`Write`]. Sums run in an order that is fixed by the shapes
//! alone, never by the number of threads, so a numeric class has one answer.
//!
//! Callers have a backend inside [`Checked`]: what shapes an op takes and what it costs stands in `ops.rs`, once for all
//! backends.
//!
//! Shapes: T tokens, C channels, H query heads, G key/value heads, D head size, F feed-forward, V vocabulary,
//! R rank, N rows (outputs) of a frozen weight, K its columns (inputs).

mod arguments;
mod check;
pub mod cpu;
pub mod cuda;
pub mod dry;
pub mod facts;
mod fault;
mod fused;
mod op_names;
mod ops;
mod shapes;
mod traffic;
mod view;
pub mod wgpu;

pub use crate::numeric::activation::{Activation, CLAMPED_LIMIT, CLAMPED_SLOPE};
use crate::numeric::block::{Blocks, Encoding};
use crate::numeric::dtype::Dtype;
pub use arguments::{
    AttentionSaved, Delta, DeltaGrad, DeltaHeads, DeltaSaved, DropoutKey, Frozen, Gates, GatesGrad, Heads,
    Norm, Product, Qkv, QkvGrad, TokenRows, Transpose, Write,
};
pub use check::{Checked, Notes, Taken};
pub use fault::Fault;
pub use fused::{Fused, LmHeadLoss, LoraGrad, LoraPart};
pub use op_names::Op;
pub use shapes::Shaped;
pub use traffic::Traffic;
pub use view::{View, ViewMut, view, view_mut};

/// The processor's cores.
pub type Cpu = Checked<cpu::Cpu>;
/// A device without data, for dry runs.
pub type Dry = Checked<dry::Dry>;
/// A GPU through wgpu.
pub type Wgpu = Checked<wgpu::Wgpu>;
/// An NVIDIA GPU through CUDA's driver.
pub type Cuda<D> = Checked<cuda::Cuda<D>>;

/// A device whose memory is counted in a dry run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// The processor's cores.
    Cpu(cpu::Footprint),
    /// A GPU through wgpu.
    Wgpu(wgpu::Footprint),
    /// An NVIDIA GPU through CUDA's driver.
    Cuda(cuda::Footprint),
}

impl Default for Target {
    /// One core, in f32.
    fn default() -> Self {
        Target::Cpu(cpu::Footprint::default())
    }
}

impl Target {
    /// The same for a model with these heads, whose widest input of a product has `widest` columns.
    pub fn of_model(self, heads: Heads, widest: usize) -> Self {
        match self {
            Target::Cuda(footprint) => Target::Cuda(footprint.with_copies(heads, widest)),
            other => other,
        }
    }

    /// The same on this number of threads, for the processor.
    pub fn on_threads(self, threads: usize) -> Self {
        match self {
            Target::Cpu(footprint) => Target::Cpu(footprint.on_threads(threads)),
            other => other,
        }
    }

    /// Bytes of a frozen matrix of that many numbers.
    pub fn matrix_bytes(self, encoding: Encoding, numbers: usize) -> usize {
        self.open().matrix_bytes(encoding, numbers)
    }

    /// Memory in which nothing is used.
    fn open(self) -> Box<dyn dry::Device> {
        match self {
            Target::Cpu(footprint) => Box::new(cpu::DryCpu::new(footprint)),
            Target::Wgpu(footprint) => Box::new(wgpu::DryWgpu::new(footprint)),
            Target::Cuda(footprint) => Box::new(cuda::DryCuda::new(footprint)),
        }
    }
}

/// The class of CPUs and GPUs that compute in f32 with the same bits (docs/explain/numerics.md).
pub const PORTABLE: &str = "portable-f32";

/// Memory and verbs of one device. All numbers that cross this seam are f32.
pub trait Backend {
    /// Device memory of f32 values.
    type Memory;
    /// A frozen matrix [N, K] in the backend's own layout.
    type Weight: Shaped;
    /// The integers of one microbatch on the device: ids, row bounds, positions.
    type Tokens: Shaped;
    /// Plain integers on the device: row numbers, or target ids.
    type Ids: Shaped;

    /// Names the numeric class: backend, kernel variant, dtype (for example `cpu-avx512-f32`).
    fn class(&self) -> String;

    /// Bytes that a number of a frozen matrix takes once it is packed.
    fn weight_bytes(&self, dtype: Dtype) -> usize {
        let _ = dtype;
        4
    }

    /// Bytes that a frozen matrix of that many numbers takes once it is packed. Goes with
    /// [`Backend::weight_of_blocks`]: here blocks are widened.
    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        match encoding {
            Encoding::Plain(dtype) => numbers * self.weight_bytes(dtype),
            Encoding::Blocks(_) => numbers * self.weight_bytes(Dtype::F32),
        }
    }

    /// How this device's memory is counted in a dry run.
    fn target(&self) -> Target;
    /// Whether values are kept. False in a dry run: then none has to be read or computed for [`Backend::upload`], and a
    /// frozen matrix may come without its bytes.
    fn has_data(&self) -> bool {
        true
    }

    /// `len` values of unspecified contents.
    fn memory(&mut self, len: usize) -> Self::Memory;
    /// The same for `rows` rows of `cols` values that norms, products and gates set, and that only products, gates and
    /// dropout read: a backend may keep such in 16 bits.
    fn short(&mut self, rows: usize, cols: usize) -> Self::Memory {
        self.memory(rows * cols)
    }
    /// `x`, which from now on only they and the gradient of attention read, as [`Backend::short`] keeps it.
    fn settle(&mut self, x: Self::Memory, rows: usize, cols: usize) -> Self::Memory {
        let _ = (rows, cols);
        x
    }
    /// Bytes that a number takes there.
    fn short_bytes(&self) -> usize {
        4
    }
    /// Gives memory back for reuse.
    fn recycle(&mut self, memory: Self::Memory);
    /// Host to device, out = values.
    fn upload(&mut self, out: ViewMut<Self::Memory>, values: &[f32]);
    /// Device to host; waits for every verb before it, and reports their faults.
    fn read(&mut self, x: View<Self::Memory>, out: &mut [f32]) -> Result<(), Fault>;
    /// The values themselves, where they are in the machine's own memory and nothing has to be waited for.
    fn lend<'m>(&self, memory: &'m Self::Memory) -> Option<&'m [f32]> {
        let _ = memory;
        None
    }
    /// Several reads that wait once.
    fn read_all(&mut self, parts: &mut [(View<Self::Memory>, &mut [f32])]) -> Result<(), Fault> {
        parts.iter_mut().try_for_each(|(x, out)| self.read(*x, out))
    }
    /// What was counted of submissions and bytes since the device was opened.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    /// The most bytes that were in use at once since this was last asked, frozen matrices apart; None of who does not
    /// count them. What is in use now is where the next answer begins.
    fn peak(&mut self) -> Option<u64> {
        None
    }
    /// Names the op that comes next, for faults.
    fn doing(&mut self, op: &'static str) {
        let _ = op;
    }
    /// Between two blocks of a model: where work is submitted in pieces, a piece had better end here.
    fn border(&mut self) {}
    /// Says what attention will be asked for. Who has a fast way for it tries it now, while it may still be dropped.
    fn prepare(&mut self, heads: Heads) -> Result<(), Fault> {
        let _ = heads;
        Ok(())
    }
    /// Packs a frozen matrix as the backend likes it.
    fn weight(&mut self, source: Frozen) -> Result<Self::Weight, Fault>;
    /// The same of a matrix in blocks. A backend that computes from blocks overrides this; here they are widened.
    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<Self::Weight, Fault> {
        let Blocks { rows, cols, block, bytes } = source;
        let mut values = vec![0.0; rows * cols];
        block.widen(&mut values, bytes);
        let (dtype, bytes) = (Dtype::F32, bytemuck::cast_slice(&values));
        self.weight(Frozen { rows: *rows, cols: *cols, dtype, bytes })
    }
    /// Frees a frozen matrix. The next one may take its memory.
    fn release(&mut self, weight: Self::Weight) {
        drop(weight);
    }
    /// Uploads the integers of a microbatch.
    fn tokens(&mut self, rows: TokenRows) -> Self::Tokens;
    /// Uploads integers.
    fn ids(&mut self, values: &[u32]) -> Self::Ids;

    /// out = value
    fn fill(&mut self, out: ViewMut<Self::Memory>, value: f32);
    /// out = x
    fn copy(&mut self, out: ViewMut<Self::Memory>, x: View<Self::Memory>);
    /// out += x
    fn add(&mut self, out: ViewMut<Self::Memory>, x: View<Self::Memory>);

    /// out[T, C] = scale * `table[ids[T]`]
    fn embed(&mut self, out: ViewMut<Self::Memory>, table: &Self::Weight, tokens: &Self::Tokens, scale: f32);

    /// out = x * inv_rms * gain with inv_rms = 1 / sqrt(mean(x²) + eps), over groups of gain.cols columns
    /// (C: the whole row; D: each head alone, as Qwen3's q/k norms). gain [1, group]; inv_rms
    /// [T, C / group] is written (=) for the gradient. (Zhang & Sennrich 2019, arXiv:1910.07467)
    fn rmsnorm(
        &mut self,
        out: ViewMut<Self::Memory>,
        inv_rms: ViewMut<Self::Memory>,
        x: View<Self::Memory>,
        gain: View<Self::Memory>,
        eps: f32,
    );
    /// dx (=|+=) inv_rms * (gain*dy - x * inv_rms² * mean(gain*dy*x)) per group. The gain is frozen.
    fn rmsnorm_grad(
        &mut self,
        dx: ViewMut<Self::Memory>,
        write: Write,
        dy: View<Self::Memory>,
        x: View<Self::Memory>,
        norm: Norm<Self::Memory>,
    );

    /// y[T, N] (=|+=) x[T, K] wᵀ
    fn linear(&mut self, y: ViewMut<Self::Memory>, write: Write, x: View<Self::Memory>, w: &Self::Weight);
    /// dx[T, K] (=|+=) dy[T, N] w
    fn linear_grad(
        &mut self,
        dx: ViewMut<Self::Memory>,
        write: Write,
        dy: View<Self::Memory>,
        w: &Self::Weight,
    );

    /// out (=|+=) scale * op(a) op(b): all of LoRA's own mathematics.
    fn matmul(&mut self, out: ViewMut<Self::Memory>, write: Write, product: Product<Self::Memory>);

    /// y[T, N] += bias[1, N]; its gradient in the input is the identity.
    fn bias(&mut self, y: ViewMut<Self::Memory>, bias: View<Self::Memory>);

    /// Rotates x[T, heads * D] in place, half-split pairs (i, i + D/2) as Hugging Face lays them out.
    /// table [positions, D]: cosines of the D/2 angles, then their sines. (Su et al. 2021, arXiv:2104.09864)
    fn rope(&mut self, x: ViewMut<Self::Memory>, table: View<Self::Memory>, tokens: &Self::Tokens);
    /// The inverse rotation, in place: the gradient of [`Backend::rope`].
    fn rope_grad(&mut self, dx: ViewMut<Self::Memory>, table: View<Self::Memory>, tokens: &Self::Tokens);

    /// out[T, H*D] = softmax(q kᵀ / sqrt(D)) v, causal, each row of the microbatch alone, within the window of the heads;
    /// logsumexp [T, H] is written (=) for the gradient. Blocked; never holds T x T.
    /// (Dao et al. 2022, arXiv:2205.14135)
    fn attention(
        &mut self,
        out: ViewMut<Self::Memory>,
        logsumexp: ViewMut<Self::Memory>,
        qkv: Qkv<Self::Memory>,
        heads: Heads,
        tokens: &Self::Tokens,
    );
    /// dq[T, H*D], dk[T, G*D], dv[T, G*D] (all =)
    fn attention_grad(
        &mut self,
        grad: QkvGrad<Self::Memory>,
        dout: View<Self::Memory>,
        saved: AttentionSaved<Self::Memory>,
        heads: Heads,
        tokens: &Self::Tokens,
    );
    /// Decoding: q holds the last rows of a sequence whose keys and values are all of k and v
    /// [past + T, G*D]; out[T, H*D] = causal attention within the window of the heads, logsumexp[T, H] (both =) as of
    /// [`Backend::attention`]. No gradient.
    fn attention_cached(
        &mut self,
        out: ViewMut<Self::Memory>,
        logsumexp: ViewMut<Self::Memory>,
        qkv: Qkv<Self::Memory>,
        heads: Heads,
    );

    /// out[T, C] = after * u, where `u[t]` is the sum of `taps[j] * (before * x)[t - j]` over the J taps, as far as token
    /// t - j is in the row of token t. Of before and x the last T rows are of the tokens, those above them of tokens before:
    /// rows of a microbatch begin at position 0, and one that continues a text finds its last values there.
    fn convolution(
        &mut self,
        out: ViewMut<Self::Memory>,
        gates: Gates<Self::Memory>,
        taps: View<Self::Memory>,
        tokens: &Self::Tokens,
    );
    /// The gradients of before, after and x (all =), each [T, C]. The taps are frozen.
    fn convolution_grad(
        &mut self,
        grad: GatesGrad<Self::Memory>,
        dout: View<Self::Memory>,
        gates: Gates<Self::Memory>,
        taps: View<Self::Memory>,
        tokens: &Self::Tokens,
    );

    /// out[T, C] = silu(u), where `u[t]` is the sum of `taps[j] * x[t - j]` over the J taps, as far as token t - j is in the
    /// row of token t. Of x the last T rows are of the tokens, those above them of tokens before, as in
    /// [`Backend::convolution`].
    fn convolution_silu(
        &mut self,
        out: ViewMut<Self::Memory>,
        x: View<Self::Memory>,
        taps: View<Self::Memory>,
        tokens: &Self::Tokens,
    );
    /// dx[T, C] =, given dout[T, C]. The taps are frozen.
    fn convolution_silu_grad(
        &mut self,
        dx: ViewMut<Self::Memory>,
        dout: View<Self::Memory>,
        x: View<Self::Memory>,
        taps: View<Self::Memory>,
        tokens: &Self::Tokens,
    );

    /// The gated delta rule. Each value head h has a state S [K, V], which is 0 at the begin of a row, and at each token
    /// becomes S := d S, then S := S + k (b e)ᵀ with e = v - Sᵀ k; out[T, H*V] = Sᵀ q. Here d = exp(rate * softplus(decay +
    /// bias)) and b = sigmoid(beta). q and k are those of key head h / (H / G). errors[T, H*V] = e, for the gradient.
    /// With `state` [H*K, V] the tokens are one row that continues there; the last state is written there (=).
    /// (Yang et al. 2024, arXiv:2412.06464)
    fn delta_rule(
        &mut self,
        out: ViewMut<Self::Memory>,
        errors: ViewMut<Self::Memory>,
        state: Option<ViewMut<Self::Memory>>,
        inputs: Delta<Self::Memory>,
        tokens: &Self::Tokens,
    );
    /// Gradients of the inputs but the rates (all =), of rows that begin in state 0.
    fn delta_rule_grad(
        &mut self,
        grad: DeltaGrad<Self::Memory>,
        dout: View<Self::Memory>,
        saved: DeltaSaved<Self::Memory>,
        inputs: Delta<Self::Memory>,
        tokens: &Self::Tokens,
    );

    /// out[T, F] = act(gate) * up, see [`Activation`] (Shazeer 2020, arXiv:2002.05202)
    fn gated(
        &mut self,
        out: ViewMut<Self::Memory>,
        gate: View<Self::Memory>,
        up: View<Self::Memory>,
        activation: Activation,
    );
    /// gate := d gate and up := d up, in place (both =), given dout[T, F].
    fn gated_grad(
        &mut self,
        gate: ViewMut<Self::Memory>,
        up: ViewMut<Self::Memory>,
        dout: View<Self::Memory>,
        activation: Activation,
    );

    /// out (=|+=) x * mask / (1 - p). Its gradient is the same verb with the same key.
    fn dropout(
        &mut self,
        out: ViewMut<Self::Memory>,
        write: Write,
        x: View<Self::Memory>,
        key: DropoutKey,
        tokens: &Self::Tokens,
    );

    /// out[n, C] = `x[rows[n], C]`; a row may be taken several times.
    fn gather_rows(&mut self, out: ViewMut<Self::Memory>, x: View<Self::Memory>, rows: &Self::Ids);
    /// dx[T, C] = 0 but `dx[rows[n]] = dout[n]`; the rows are distinct.
    fn gather_rows_grad(&mut self, dx: ViewMut<Self::Memory>, dout: View<Self::Memory>, rows: &Self::Ids);

    /// out[N, F] = `scales[n] * x[n]`, with scales [N, 1].
    fn scale_rows(&mut self, out: ViewMut<Self::Memory>, x: View<Self::Memory>, scales: View<Self::Memory>);
    /// dscales[N, 1] = sum of `dx[n] * x[n]` and, in place, dx := `scales[n] * dx[n]`, given the gradient of
    /// [`Backend::scale_rows`] in dx[N, F].
    fn scale_rows_grad(
        &mut self,
        dx: ViewMut<Self::Memory>,
        dscales: ViewMut<Self::Memory>,
        x: View<Self::Memory>,
        scales: View<Self::Memory>,
    );

    /// losses[n, 1] = weight * (logsumexp(logits) - `logits[target]`) and, in place, logits := the gradient of
    /// the *sum* of losses, weight * (softmax - onehot). class_weights [1, V] or none (all one).
    fn cross_entropy(
        &mut self,
        losses: ViewMut<Self::Memory>,
        logits: ViewMut<Self::Memory>,
        targets: &Self::Ids,
        class_weights: Option<View<Self::Memory>>,
    );
}
