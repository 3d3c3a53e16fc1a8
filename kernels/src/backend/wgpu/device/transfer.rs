//! Transfers to and from a device: integers in order with the recorded work, frozen matrices ahead of recorded work
//! that is not submitted yet, results in one piece.

use super::{Gpu, Op, READ, buffer, proof};
use crate::backend::Fault;
use crate::backend::wgpu::pool::Storage;

/// Frozen bytes that may wait on the host.
const PENDING: usize = 64 << 20;

impl Gpu {
    /// Records a write of `bytes` to a buffer; the bytes are copied at once.
    pub fn upload(&mut self, to: &Storage, offset: u64, bytes: &[u8]) {
        if self.faults.raised() || bytes.is_empty() {
            return;
        }
        let from = self.staged.len() as u64;
        self.staged.extend_from_slice(bytes);
        self.traffic.uploaded += bytes.len() as u64;
        self.ops.push(Op::Stage { from, to: to.buffer.clone(), offset, bytes: bytes.len() as u64 });
    }

    /// Writes a buffer that no recorded operation uses, after all submitted ones, in pieces, so that the host never
    /// holds a second copy of much of it.
    pub fn write_new(&mut self, to: &Storage, bytes: &[u8]) {
        // Only whole words can be written.
        let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        let pieces = words.chunks(PENDING).zip((0..).step_by(PENDING));
        for (piece, at) in pieces.chain([(&last[..], words.len() as u64)]) {
            if self.faults.raised() || at >= bytes.len() as u64 {
                return;
            }
            if self.pending + piece.len() > PENDING {
                self.pending = 0;
                // What is recorded has not been sent, so its parameters are not on the device yet.
                let sent = self.send(&mut Vec::new(), &mut Vec::new(), None);
                self.wait(sent.map(|(index, _)| index));
            }
            self.queue.write_buffer(&to.buffer, at, piece);
            self.traffic.uploaded += piece.len() as u64;
            self.pending += piece.len();
        }
    }

    /// Computes all earlier work, then reads the parts (buffer, first byte, bytes) in one piece.
    pub fn read(&mut self, parts: &[(&Storage, u64, u64)], out: &mut [u8]) -> Result<(), Fault> {
        self.check()?;
        match parts.iter().map(|p| p.2).sum() {
            0 => Ok(()),
            total => self.read_proven(parts, total, out),
        }
    }

    /// Computes all earlier work, and returns whether it ran.
    pub fn proven(&mut self) -> Result<(), Fault> {
        self.check()?;
        self.read_proven(&[], 0, &mut [])
    }

    fn read_proven(
        &mut self,
        parts: &[(&Storage, u64, u64)],
        total: u64,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        if total + proof::BYTES > self.read_buffer.size() {
            self.faults.wanting(total);
            self.read_buffer = buffer(&self.device, self.pool.class(total + proof::BYTES), READ);
        }
        let mut at = 0;
        for (storage, from, bytes) in parts {
            let (from_buffer, to) = (storage.buffer.clone(), self.read_buffer.clone());
            self.ops.push(Op::Copy { from: from_buffer, at: *from, to, offset: at, bytes: *bytes });
            at += bytes;
        }
        self.submit_with_proof(Some(total));
        self.check()?;
        let got = self.map(total, out);
        if got.is_err() {
            // The old one may still be mapped, or be about to be mapped.
            self.read_buffer = buffer(&self.device, 1 << 16, READ);
        }
        got
    }

    /// Copies the contents of the read buffer.
    fn map(&mut self, total: u64, out: &mut [u8]) -> Result<(), Fault> {
        let (send, arrived) = std::sync::mpsc::channel();
        let range = 0..total + proof::BYTES;
        self.read_buffer.map_async(wgpu::MapMode::Read, range.clone(), move |mapped| drop(send.send(mapped)));
        self.finish();
        self.check()?;
        match arrived.try_recv() {
            Ok(Ok(())) => {}
            _ => self.faults.raise("the results could not be mapped"),
        }
        self.check()?;
        match self.read_buffer.get_mapped_range(range) {
            Ok(bytes) if self.proof.holds(&bytes[total as usize..]) => {
                out.copy_from_slice(&bytes[..total as usize]);
            }
            Ok(_) => {
                self.faults.doing("read");
                self.faults.raise("work that the driver reports as done did not run, or ran twice");
            }
            Err(error) => self.faults.raise(&error.to_string()),
        }
        self.read_buffer.unmap();
        self.traffic.read_backs += 1;
        self.traffic.read += total;
        self.check()
    }
}
