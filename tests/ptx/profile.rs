//! Seconds per kernel of a step on a card: a driver that waits after each launch. The switch `profile` of `step::step`
//! prints them. Each launch takes 10 to 40 microseconds longer than without.

use finetune::backend::Fault;
use finetune::backend::cuda::{Driver, Launch, Libcuda};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::Instant;

/// Launches and seconds, by entry.
static SPENT: LazyLock<Mutex<HashMap<String, (u32, f64)>>> = LazyLock::new(Mutex::default);

pub struct Profiled {
    card: Libcuda,
    /// Memory whose read waits for all work.
    end: u64,
}

impl Profiled {
    pub fn new(card: Libcuda) -> Self {
        let mut card = card.kernel_by_kernel();
        let end = card.alloc(256).unwrap();
        Self { card, end }
    }

    fn wait(&mut self) -> Result<(), Fault> {
        self.card.read(self.end, &mut [0; 4])
    }
}

/// Forgets what was measured.
pub fn reset() {
    SPENT.lock().unwrap().clear();
}

/// Prints the kernels with the most seconds.
pub fn print() {
    let spent = SPENT.lock().unwrap();
    let mut all: Vec<_> = spent.iter().collect();
    all.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let sum: f64 = all.iter().map(|(_, (_, seconds))| seconds).sum();
    println!("timing profile: {:.1} ms", 1e3 * sum);
    for (entry, (count, seconds)) in all.iter().take(40) {
        println!("timing profile {:9.3} ms {count:5} x {entry}", 1e3 * seconds);
    }
}

impl Driver for Profiled {
    fn name(&self) -> &str {
        self.card.name()
    }
    fn capability(&self) -> (u32, u32) {
        self.card.capability()
    }
    fn sm90a(&self) -> Option<u32> {
        self.card.sm90a()
    }
    fn granularity(&self) -> usize {
        self.card.granularity()
    }
    fn alloc(&mut self, bytes: usize) -> Result<u64, Fault> {
        self.card.alloc(bytes)
    }
    fn free(&mut self, address: u64) {
        self.card.free(address);
    }
    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.card.write(to, bytes)
    }
    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.card.read(from, out)
    }
    fn variant(&self) -> String {
        self.card.variant()
    }
    fn launch(&mut self, launch: &Launch) -> Result<(), Fault> {
        self.wait()?;
        let began = Instant::now();
        self.card.launch(launch)?;
        self.wait()?;
        let [x, y, z] = launch.grid;
        let mut spent = SPENT.lock().unwrap();
        let entry = spent.entry(format!("{} {x}x{y}x{z}", launch.entry)).or_default();
        *entry = (entry.0 + 1, entry.1 + began.elapsed().as_secs_f64());
        Ok(())
    }
}
