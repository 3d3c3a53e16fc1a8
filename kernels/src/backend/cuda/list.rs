//! Launches that wait. The launches of verbs are collected here and sent when a result is needed: before a read, before
//! an upload into memory that a kernel may use, before the pool asks the device for memory that it must free other
//! memory for, or when 65,536 wait. If the pool has all the memory, a microbatch is one list, which a driver may
//! recognize ([`super::graphs`]). Integers are written ahead of the list: no other launch uses their memory until it is
//! sent ([`super::pool`]).

use super::{Arg, Driver, Launch};
use crate::backend::Fault;

/// Most launches that wait: a caller that never reads sends now and then.
pub(super) const MOST: usize = 1 << 16;

/// A launch that waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiting {
    file: &'static str,
    entry: Box<str>,
    grid: [u32; 3],
    threads: u32,
    args: Vec<Arg>,
}

impl Waiting {
    fn of(launch: &Launch) -> Self {
        let Launch { file, entry, grid, threads, args } = *launch;
        Waiting { file, entry: entry.into(), grid, threads, args: args.into() }
    }

    /// The launch.
    pub fn launch(&self) -> Launch<'_> {
        let Waiting { file, entry, grid, threads, args } = self;
        Launch { file, entry, grid: *grid, threads: *threads, args }
    }

    /// Whether both launch the same kernel, whatever their arguments.
    pub(super) fn like(&self, other: &Waiting) -> bool {
        (self.file, &self.entry) == (other.file, &other.entry)
    }
}

/// Launches in order, and the buffers that are reused between them.
#[derive(Debug, Default)]
pub struct List {
    launches: Vec<Waiting>,
    /// Launch before which a buffer is reused, its address, its bytes.
    forgotten: Vec<(usize, u64, usize)>,
}

impl List {
    /// The launches, in order.
    pub fn launches(&self) -> &[Waiting] {
        &self.launches
    }

    /// Launches one by one. Returns their number.
    pub fn one_by_one<D: Driver + ?Sized>(&self, driver: &mut D) -> Result<u64, Fault> {
        let mut forgotten = self.forgotten.iter().peekable();
        for (i, waiting) in self.launches.iter().enumerate() {
            while let Some((_, address, bytes)) = forgotten.next_if(|(before, ..)| *before <= i) {
                driver.forget(*address, *bytes);
            }
            driver.launch(&waiting.launch())?;
        }
        forgotten.for_each(|(_, address, bytes)| driver.forget(*address, *bytes));
        Ok(self.launches.len() as u64)
    }

    pub(super) fn push(&mut self, launch: &Launch) {
        self.launches.push(Waiting::of(launch));
    }

    pub(super) fn forget(&mut self, address: u64, bytes: usize) {
        self.forgotten.push((self.launches.len(), address, bytes));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.launches.is_empty() && self.forgotten.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.launches.clear();
        self.forgotten.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::tests::Card;
    use crate::backend::{Backend, Cuda, view, view_mut};

    #[test]
    fn pending_work_is_sent_before_its_memory_is_freed_or_used() {
        let mut device = Cuda::on(Card::of(20 << 20));
        let (mut a, mut b) = (device.memory(1 << 20), device.memory(1 << 20));
        device.fill(view_mut(&mut a, 1, 4), 1.0);
        device.copy(view_mut(&mut b, 1, 4), view(&a, 1, 4));
        drop((a, b));
        let _small = device.memory(4);
        assert_eq!(device.driver().did, [""; 0], "there is room, so no memory is freed yet");
        let mut large = device.memory(4 << 20);
        assert_eq!(device.driver().did, ["fill", "copy", "free", "free"]);
        device.fill(view_mut(&mut large, 1, 4), 1.0);
        device.upload(view_mut(&mut large, 1, 4), &[2.0; 4]);
        assert_eq!(device.driver().did[4..], ["fill"], "an upload comes after what was launched before it");
        device.fill(view_mut(&mut large, 1, 4), 3.0);
        let _ids = device.ids(&[1, 2, 3]);
        assert_eq!(device.driver().did[5..], [""; 0], "integers go ahead");
        device.read(view(&large, 1, 4), &mut [0.0; 4]).unwrap();
        assert_eq!(device.driver().did[5..], ["fill"]);
        assert_eq!((device.traffic().dispatches, device.traffic().submissions), (4, 4));
    }
}
