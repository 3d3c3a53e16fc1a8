//! One opened device: it records operations, submits them, waits, and reads back. Operations are encoded at submission,
//! so that everything that they read (parameters, uploads) is written to the device once per submission, in one piece.
//!
//! At most one submission is in flight, so that each is measured alone: operating systems reset a GPU that hangs for
//! two seconds. The recorded work is submitted at the border of a block before its estimate exceeds [`Pace::ends`], and
//! anywhere before it exceeds [`Pace::bound`].

mod proof;
mod transfer;

use super::faults::Faults;
use super::kernel::{Constant, Kernel, PARAMS};
use super::pace::Pace;
use super::pipelines::{Pipelines, Slot};
use super::pool::{Leased, Pool, Storage};
use crate::backend::{Fault, Traffic};
use crate::support::panics::caught;
pub use proof::KERNELS;
use proof::Proof;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wgpu::{BufferUsages, PollError, PollStatus, PollType, SubmissionIndex};

/// Most dispatches whose parameters one submission holds.
const DISPATCHES: u64 = 16_384;
/// The time without an answer after which a device counts as lost.
const PATIENCE: Duration = Duration::from_secs(300);

/// A dispatch to record.
pub struct Call<'a> {
    /// The kernel.
    pub kernel: &'static Kernel,
    /// Its constants.
    pub constants: &'a [Constant],
    /// Its parameters, f32 as bits.
    pub params: &'a [u32],
    /// Its buffers.
    pub slots: &'a [Slot],
    /// Number of workgroups.
    pub groups: u64,
    /// Estimated cost in multiplications and additions, or in operations that take as long.
    pub work: f64,
}

/// A recorded operation.
pub(super) enum Op {
    Dispatch {
        verb: &'static str,
        pipeline: wgpu::ComputePipeline,
        group: wgpu::BindGroup,
        at: u32,
        grid: (u32, u32),
    },
    /// A copy from the staged bytes of this submission.
    Stage {
        from: u64,
        to: wgpu::Buffer,
        offset: u64,
        bytes: u64,
    },
    Copy {
        from: wgpu::Buffer,
        at: u64,
        to: wgpu::Buffer,
        offset: u64,
        bytes: u64,
    },
}

/// A device and its recorded operations.
pub struct Gpu {
    /// wgpu's device.
    pub device: wgpu::Device,
    queue: wgpu::Queue,
    /// Limits of the device.
    pub limits: wgpu::Limits,
    /// The first fault is latched here.
    pub faults: Faults,
    /// The pool of buffers.
    pub pool: Pool,
    /// Compiled kernels.
    pub pipelines: Pipelines,
    /// The measured rate, and the limit of a submission.
    pub pace: Pace,
    /// Counts since the device was opened.
    pub traffic: Traffic,
    /// The most work of one submission since the last query.
    pub heaviest: f64,
    ops: Vec<Op>,
    params: Vec<u8>,
    staged: Vec<u8>,
    params_buffer: wgpu::Buffer,
    stage_buffer: wgpu::Buffer,
    read_buffer: wgpu::Buffer,
    proof: Proof,
    work: f64,
    /// Work recorded since the last read, and how much of it before the last border.
    passed: f64,
    border_at: f64,
    /// The work of each block since the last read, and of each block before that read.
    blocks: Vec<f64>,
    before: Vec<f64>,
    /// Submissions that ended inside a block because they had grown too long.
    pub inside: Arc<AtomicU64>,
    in_flight: Option<Flight>,
    pending: usize,
    /// Number of kernels compiled before the last submission.
    known: usize,
    /// Makes every poll report the loss of the device.
    #[cfg(feature = "faults")]
    pub(super) gone: Arc<std::sync::atomic::AtomicBool>,
    /// Harms the next submission.
    #[cfg(feature = "faults")]
    pub(super) harm: Arc<std::sync::Mutex<Option<super::breaker::Harm>>>,
}

/// A submission that is not yet awaited.
struct Flight {
    index: SubmissionIndex,
    started: Instant,
    work: f64,
    /// Whether a kernel runs for the first time: some drivers compile it only then, so its time does not measure the
    /// device.
    first: bool,
}

fn buffer(device: &wgpu::Device, size: u64, usage: BufferUsages) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
}

const STAGE: BufferUsages = BufferUsages::COPY_SRC.union(BufferUsages::COPY_DST);
const READ: BufferUsages = BufferUsages::MAP_READ.union(BufferUsages::COPY_DST);

impl Gpu {
    /// Wraps an opened device, with `budget` bytes for its buffers; `limits` may be tighter than the device's own.
    pub fn new(
        (device, queue): (wgpu::Device, wgpu::Queue),
        (limits, budget): (wgpu::Limits, u64),
        faults: Faults,
        pace: Pace,
    ) -> Gpu {
        faults.watch(&device);
        let stride = stride(&limits);
        let params_buffer =
            buffer(&device, (DISPATCHES + 1) * stride, BufferUsages::UNIFORM.union(BufferUsages::COPY_DST));
        let stage_buffer = buffer(&device, 1 << 16, STAGE);
        let read_buffer = buffer(&device, 1 << 16, READ);
        let proof = Proof::new(&device);
        Gpu {
            pool: Pool::new(&device, budget),
            pipelines: Pipelines::default(),
            device,
            queue,
            limits,
            faults,
            pace,
            traffic: Traffic::default(),
            heaviest: 0.0,
            ops: Vec::new(),
            params: Vec::new(),
            staged: Vec::new(),
            params_buffer,
            stage_buffer,
            read_buffer,
            proof,
            work: 0.0,
            passed: 0.0,
            border_at: 0.0,
            blocks: Vec::new(),
            before: Vec::new(),
            inside: Arc::default(),
            in_flight: None,
            pending: 0,
            known: 0,
            #[cfg(feature = "faults")]
            gone: Arc::default(),
            #[cfg(feature = "faults")]
            harm: Arc::default(),
        }
    }

    /// A buffer of at least this many bytes.
    pub fn take(&mut self, bytes: u64) -> Storage {
        if bytes == 0 || self.faults.raised() {
            return self.pool.take(&self.device, &self.faults, bytes);
        }
        let tight = self.pool.make_room(bytes);
        self.forget();
        if tight {
            self.settle();
        }
        let storage = self.pool.take(&self.device, &self.faults, bytes);
        // Free buffers of the pool may be the memory that the driver lacks.
        if storage.id == 0 && self.faults.is_memory() && self.pool.let_go() {
            self.faults.forgive();
            self.forget();
            self.settle();
            return self.pool.take(&self.device, &self.faults, bytes);
        }
        storage
    }

    /// A buffer for a frozen matrix of this many bytes, a multiple of four, to be written at once. Recorded operations
    /// that may still read it are submitted first.
    pub fn freeze(&mut self, bytes: u64) -> Option<Storage> {
        if let Some(storage) = self.pool.reuse(bytes) {
            if self.ops.iter().any(|op| matches!(op, Op::Dispatch { .. })) {
                self.submit();
            }
            return Some(storage);
        }
        if self.pool.make_frozen_room(bytes) {
            self.forget();
            self.settle();
        }
        let made = self.pool.freeze(&self.device, &self.faults, bytes);
        if made.is_none() && self.faults.is_memory() && self.pool.let_go() {
            self.faults.forgive();
            self.forget();
            self.settle();
            return self.pool.freeze(&self.device, &self.faults, bytes);
        }
        made
    }

    /// A buffer that is returned to the pool on drop.
    pub fn lease(&mut self, bytes: u64) -> Leased {
        let storage = self.take(bytes);
        self.pool.lease(storage, bytes)
    }

    /// Drops the bind groups of dropped buffers.
    fn forget(&mut self) {
        let dropped = std::mem::take(&mut self.pool.dropped);
        self.pipelines.forget(&dropped);
    }

    /// Submits the recorded work and waits for it: a buffer exists as long as such work uses it.
    fn settle(&mut self) {
        self.submit();
        self.finish();
        self.look();
    }

    /// Records a dispatch.
    pub fn dispatch(&mut self, call: Call) {
        if self.faults.raised() || call.groups == 0 {
            return;
        }
        let verb = call.kernel.name;
        self.faults.doing(verb);
        let long = self.pace.seconds(self.work + call.work) > self.pace.bound();
        let full = self.params.len() as u64 + stride(&self.limits) > DISPATCHES * stride(&self.limits);
        if full || (long && !self.ops.is_empty()) {
            self.inside.fetch_add(1, Ordering::Relaxed);
            self.submit();
        }
        let built = self.pipelines.kernel(&self.device, &self.faults, call.kernel, call.constants);
        let Some(built) = built else { return };
        let group = self.pipelines.group(&self.device, &built, &self.params_buffer, call.slots);
        let most = u64::from(self.limits.max_compute_workgroups_per_dimension);
        let x = call.groups.min(most);
        let y = call.groups.div_ceil(x);
        if y > most || call.params.len() * 4 > PARAMS {
            return self.faults.raise("more workgroups or parameters than a dispatch can have");
        }
        let at = self.params.len();
        self.params.extend_from_slice(bytemuck::cast_slice(call.params));
        self.params.resize(at + stride(&self.limits) as usize, 0);
        self.work += call.work;
        self.passed += call.work;
        self.traffic.dispatches += 1;
        let grid = (x as u32, y as u32);
        self.ops.push(Op::Dispatch { verb, pipeline: built.pipeline, group, at: at as u32, grid });
    }

    /// Marks the end of a block. Submits the recorded work if the next block would make it too much. The next block is
    /// estimated by its work in the last microbatch, scaled by the block that ends here.
    pub fn border(&mut self) {
        let block = self.passed - std::mem::replace(&mut self.border_at, self.passed);
        let at = self.blocks.len();
        self.blocks.push(block);
        let next = match self.before.get(at..at + 2) {
            Some(&[same, next]) if same > 0.0 => next * block / same,
            _ => block,
        };
        if !self.ops.is_empty() && self.pace.ends(self.work, next, self.passed) {
            self.submit();
        }
    }

    /// Marks the end of a microbatch, after its read.
    pub fn lap(&mut self) {
        self.pace.lap();
        (self.passed, self.border_at) = (0.0, 0.0);
        std::mem::swap(&mut self.blocks, &mut self.before);
        self.blocks.clear();
    }

    /// Submits the recorded work.
    pub fn submit(&mut self) {
        self.submit_with_proof(None);
    }

    /// The same; the proof that it ran comes to this byte of the read buffer.
    fn submit_with_proof(&mut self, read_at: Option<u64>) {
        self.finish();
        let (mut ops, mut params, staged) = (
            std::mem::take(&mut self.ops),
            std::mem::take(&mut self.params),
            std::mem::take(&mut self.staged),
        );
        let work = std::mem::take(&mut self.work);
        if (ops.is_empty() && read_at.is_none()) || self.faults.raised() {
            return;
        }
        if staged.len() as u64 > self.stage_buffer.size() {
            self.faults.wanting(staged.len() as u64);
            self.stage_buffer = buffer(&self.device, self.pool.class(staged.len() as u64), STAGE);
        }
        if !staged.is_empty() {
            self.queue.write_buffer(&self.stage_buffer, 0, &staged);
        }
        let Some((index, started)) = self.send(&mut ops, &mut params, read_at) else { return };
        self.traffic.submissions += 1;
        let first = self.pipelines.compiled() != self.known;
        self.known = self.pipelines.compiled();
        self.in_flight = Some(Flight { index, started, work, first });
        // The vectors are kept, so that the next recording allocates nothing.
        (self.ops, self.params, self.staged) = (ops, params, staged);
        self.ops.clear();
        self.params.clear();
        self.staged.clear();
    }

    /// Sends operations and the proof behind them, and returns when; `None` after a fault.
    fn send(
        &mut self,
        ops: &mut Vec<Op>,
        params: &mut Vec<u8>,
        read_at: Option<u64>,
    ) -> Option<(SubmissionIndex, Instant)> {
        self.prove(ops, params, read_at);
        self.queue.write_buffer(&self.params_buffer, 0, params);
        let commands: Vec<_> = self.lists(ops).into_iter().map(|ops| self.encode(ops)).collect();
        if self.faults.raised() {
            return None;
        }
        self.proof.sent();
        let started = Instant::now();
        Some((self.queue.submit(commands), started))
    }

    /// The operations, each list for one command buffer: all, unless a test breaks the device.
    #[cfg(not(feature = "faults"))]
    fn lists<'a>(&self, ops: &'a [Op]) -> Vec<&'a [Op]> {
        vec![ops]
    }

    fn encode(&self, ops: &[Op]) -> wgpu::CommandBuffer {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut left = ops;
        while let Some(first) = left.first() {
            match first {
                Op::Stage { from, to, offset, bytes } => {
                    encoder.copy_buffer_to_buffer(&self.stage_buffer, *from, to, *offset, Some(*bytes));
                    left = &left[1..];
                }
                Op::Copy { from, at, to, offset, bytes } => {
                    encoder.copy_buffer_to_buffer(from, *at, to, *offset, Some(*bytes));
                    left = &left[1..];
                }
                Op::Dispatch { .. } => {
                    let count = left.iter().take_while(|op| matches!(op, Op::Dispatch { .. })).count();
                    self.encode_pass(&mut encoder, &left[..count]);
                    left = &left[count..];
                }
            }
        }
        encoder.finish()
    }

    fn encode_pass(&self, encoder: &mut wgpu::CommandEncoder, ops: &[Op]) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for op in ops {
            let Op::Dispatch { verb, pipeline, group, at, grid } = op else { continue };
            self.faults.doing(verb);
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, group, &[*at]);
            pass.dispatch_workgroups(grid.0, grid.1, 1);
        }
    }

    fn wait(&self, submission_index: Option<SubmissionIndex>) {
        let patience = PollType::Wait { submission_index, timeout: Some(PATIENCE) };
        match self.poll(patience) {
            Some(Err(PollError::Timeout)) => {
                self.faults.raise(&format!("no answer within {} s", PATIENCE.as_secs()))
            }
            // The device did not accept the submission.
            Some(Err(error)) => self.faults.raise(&format!("the device is lost: {error}")),
            Some(Ok(_)) | None => {}
        }
    }

    /// Whether all submitted work is done. Calls handlers.
    fn look(&self) -> bool {
        matches!(self.poll(PollType::Poll), Some(Ok(status)) if status.is_queue_empty())
    }

    /// Polls the device. Returns `None` if the driver has lost it: wgpu reports this only by a panic.
    fn poll(&self, kind: PollType) -> Option<Result<PollStatus, PollError>> {
        let polled = caught(|| {
            #[cfg(feature = "faults")]
            assert!(!self.gone.load(Ordering::Relaxed), "Error in Device::poll: Parent device is lost");
            self.device.poll(kind)
        });
        polled.map_err(|text| self.faults.lost(&text)).ok()
    }

    /// Waits for the submission, and updates the measured rate.
    pub fn finish(&mut self) {
        let Some(flight) = self.in_flight.take() else { return };
        // If the work was already done, the elapsed time is only an upper bound.
        let looked_late = self.look();
        self.wait(Some(flight.index));
        let seconds = flight.started.elapsed().as_secs_f64();
        self.heaviest = self.heaviest.max(flight.work);
        match (flight.first, looked_late) {
            (true, _) | (false, true) => self.pace.learn_at_most(flight.work, seconds),
            (false, false) => {
                self.pace.learn(flight.work, seconds);
                self.traffic.longest_submission = self.traffic.longest_submission.max(seconds);
            }
        }
    }

    /// The first fault. A lost device reports the loss when polled, perhaps after a consequence of it.
    pub fn check(&self) -> Result<(), Fault> {
        if self.faults.raised() {
            self.look();
        }
        self.faults.check()
    }
}

/// Distance between the parameters of two dispatches.
fn stride(limits: &wgpu::Limits) -> u64 {
    (PARAMS as u64).next_multiple_of(u64::from(limits.min_uniform_buffer_offset_alignment))
}
