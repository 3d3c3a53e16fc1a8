//! Pinned host memory between callers and the device: two halves, used alternately. The driver may read a source that
//! is not pinned after its copy call has returned (CUDA driver API, "API synchronization behavior"), so bytes are
//! copied here first. A half is reused once the copies out of it are done.

use super::waits::{Stop, Waits};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Bytes of a half.
const HALF: usize = 4 << 20;

/// Both halves, and an event after the last copy out of each.
pub(super) struct Staging {
    memory: *mut c_void,
    events: [sys::CUevent; 2],
    side: usize,
    used: usize,
    /// How long this device's waits last.
    pub waits: Waits,
}

fn check(code: CUresult) -> Result<(), CUresult> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

impl Staging {
    /// Allocates in the current context.
    pub fn new() -> Result<Self, CUresult> {
        let mut it = Staging {
            memory: null_mut(),
            events: [null_mut(); 2],
            side: 0,
            used: 0,
            waits: Waits::default(),
        };
        // SAFETY: outputs are handles of this value, which frees them in `free`.
        let made = unsafe {
            check(sys::cuMemHostAlloc(&mut it.memory, 2 * HALF, 0)).and_then(|()| {
                // 1: a wait of the driver blocks the thread; 2: without timing, which costs time.
                it.events.iter_mut().try_for_each(|event| check(sys::cuEventCreate(event, 1 | 2)))
            })
        };
        if let Err(code) = made {
            it.free();
            return Err(code);
        }
        Ok(it)
    }

    /// Queues a copy of `bytes` to the device on `stream`. `bytes` may change as soon as this returns. The context of
    /// [`Staging::new`] must be current.
    pub fn write(&mut self, mut to: u64, mut bytes: &[u8], stream: sys::CUstream) -> Result<(), Stop> {
        while !bytes.is_empty() {
            if self.used == HALF {
                self.turn(stream)?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(HALF - self.used));
            // SAFETY: `now` fits behind `used` in this half, whose earlier copies are done (turn) or are before it.
            unsafe {
                let at = self.memory.cast::<u8>().add(self.side * HALF + self.used);
                at.copy_from_nonoverlapping(now.as_ptr(), now.len());
                check(sys::cuMemcpyHtoDAsync_v2(to, at.cast_const().cast(), now.len(), stream))?;
            }
            self.used = (self.used + now.len()).next_multiple_of(16);
            to += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// Switches to the other half, once the copies out of it are done.
    fn turn(&mut self, stream: sys::CUstream) -> Result<(), Stop> {
        // SAFETY: event and stream live.
        check(unsafe { sys::cuEventRecord(self.events[self.side], stream) })?;
        self.side = 1 - self.side;
        // An event that was never recorded is done.
        self.waits.event(self.events[self.side])?;
        self.used = 0;
        Ok(())
    }

    /// Reads parts of device memory after all queued work of `stream`. Waits for that work even after an error.
    pub fn read(&mut self, parts: &mut [(u64, &mut [u8])], stream: sys::CUstream) -> Result<(), Stop> {
        let pieces = parts.iter_mut().flat_map(|(from, out)| {
            let from = *from;
            out.chunks_mut(HALF).enumerate().map(move |(i, piece)| (from + (i * HALF) as u64, piece))
        });
        // Copies out of these halves precede those into them, on the same stream.
        let mut filling: [Option<&mut [u8]>; 2] = [None, None];
        let mut queued = Ok(());
        for (i, (from, piece)) in pieces.enumerate() {
            let side = i % 2;
            queued = self
                .emptied(side, filling[side].take())
                .and_then(|()| self.fill(side, (from, piece.len()), stream));
            if queued.is_err() {
                break;
            }
            filling[side] = Some(piece);
        }
        match queued {
            // A card that is lost is not waited for again: nothing of it is freed.
            Err(stop) if stop.lasts() => return Err(stop),
            queued => self.waits.stream(stream).and(queued)?,
        }
        for (side, piece) in filling.into_iter().enumerate() {
            self.empty(side, piece);
        }
        (self.side, self.used) = (0, 0);
        Ok(())
    }

    /// Queues a copy into a half, and an event after it.
    fn fill(&mut self, side: usize, (from, len): (u64, usize), stream: sys::CUstream) -> Result<(), Stop> {
        // SAFETY: a piece is no longer than a half, and the half has no reader any more.
        unsafe {
            let at = self.memory.cast::<u8>().add(side * HALF);
            check(sys::cuMemcpyDtoHAsync_v2(at.cast(), from, len, stream))?;
            check(sys::cuEventRecord(self.events[side], stream))?;
        }
        Ok(())
    }

    /// Waits until a half is filled, and copies it out.
    fn emptied(&mut self, side: usize, out: Option<&mut [u8]>) -> Result<(), Stop> {
        if out.is_some() {
            self.waits.event(self.events[side])?;
        }
        self.empty(side, out);
        Ok(())
    }

    fn empty(&self, side: usize, out: Option<&mut [u8]>) {
        let Some(out) = out else { return };
        // SAFETY: the copy into this half is over; it has at least as many bytes.
        unsafe {
            let at = self.memory.cast::<u8>().add(side * HALF);
            out.as_mut_ptr().copy_from_nonoverlapping(at, out.len());
        }
    }

    /// Frees all. No copy is under way and the context is current.
    pub fn free(&mut self) {
        for event in &mut self.events {
            if !event.is_null() {
                // SAFETY: destroyed once.
                unsafe { sys::cuEventDestroy_v2(*event) };
                *event = null_mut();
            }
        }
        if !self.memory.is_null() {
            // SAFETY: freed once.
            unsafe { sys::cuMemFreeHost(self.memory) };
            self.memory = null_mut();
        }
    }
}
