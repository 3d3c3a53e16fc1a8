//! Proof that submitted work was done, once. Some drivers report work as done that they ended early: Metal a submission
//! that held the screen for too long, DX12 all work of a removed card. The results of earlier work would then be read as
//! new ones. Therefore each submission ends with a kernel that continues a chain of numbers, and each read returns the
//! chain. It differs from the host's if a submission was dropped, ended early or ran twice, or if its uploads did not
//! arrive: the kernel's number is one of them.

use super::{Gpu, Op, STAGE, buffer, stride};
use crate::backend::Fault;
use crate::backend::wgpu::kernel::Access::Write as Written;
use crate::backend::wgpu::kernel::Kernel;
use crate::backend::wgpu::pipelines::Slot;
use wgpu::BufferUsages;

static PROOF: Kernel =
    Kernel { name: "proof", source: &[include_str!("../../../../wgsl/proof.wgsl")], buffers: &[Written] };

/// The kernels of this file.
pub const KERNELS: &[&Kernel] = &[&PROOF];

/// Bytes of the chain.
pub const BYTES: u64 = 4;

/// The chain on the device, and its expected value.
pub struct Proof {
    slot: Slot,
    expected: u32,
    number: u32,
}

impl Proof {
    /// The beginning of a chain. wgpu fills new buffers with zeros.
    pub fn new(device: &wgpu::Device) -> Proof {
        let buffer = buffer(device, BYTES, BufferUsages::STORAGE.union(STAGE));
        // The pool never has as many buffers.
        Proof { slot: Slot { buffer, id: u64::MAX, offset: 0, size: BYTES }, expected: 0, number: 0 }
    }

    /// Counts a submission as sent.
    pub fn sent(&mut self) {
        self.expected = self.expected.wrapping_mul(747_796_405).wrapping_add(self.number);
    }

    /// Whether these bytes are the chain's expected value.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        bytes == self.expected.to_le_bytes()
    }
}

impl Gpu {
    /// Ends a submission with the kernel of the chain, and with its copy to this byte of the read buffer.
    pub(super) fn prove(&mut self, ops: &mut Vec<Op>, params: &mut Vec<u8>, read_at: Option<u64>) {
        let built = self.pipelines.kernel(&self.device, &self.faults, &PROOF, &[]);
        let Some(built) = built else { return };
        let slots = [self.proof.slot.clone()];
        let group = self.pipelines.group(&self.device, &built, &self.params_buffer, &slots);
        self.proof.number = self.proof.number.wrapping_add(1);
        let at = params.len();
        params.extend_from_slice(&self.proof.number.to_le_bytes());
        params.resize(at + stride(&self.limits) as usize, 0);
        // A fault names the verb before.
        let verb = |op: &Op| if let Op::Dispatch { verb, .. } = op { Some(*verb) } else { None };
        let verb = ops.iter().rev().find_map(verb).unwrap_or(PROOF.name);
        let (at, grid) = (at as u32, (1, 1));
        ops.push(Op::Dispatch { verb, pipeline: built.pipeline, group, at, grid });
        ops.extend(read_at.map(|offset| {
            let (from, to) = (self.proof.slot.buffer.clone(), self.read_buffer.clone());
            Op::Copy { from, at: 0, to, offset, bytes: BYTES }
        }));
    }

    /// [`Faults::forgive`](super::Faults::forgive), if what was sent may not have run: begins a new chain.
    pub fn forgive(&mut self) -> Option<Fault> {
        let fault = self.faults.forgive();
        self.queue.write_buffer(&self.proof.slot.buffer, 0, &[0; BYTES as usize]);
        self.proof.expected = 0;
        fault
    }
}
