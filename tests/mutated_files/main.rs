//! Every format that the program reads, damaged with knowledge of its structure. Whatever the damage, the reader
//! returns a value, or an error of one line without control characters except tabs. A reader does not panic or hang,
//! and holds at most 64 MiB plus sixteen times the size of the files.
//!
//! A seed determines the cases, so that each can be repeated. Environment: FINETUNE_FUZZ_SEED, FINETUNE_FUZZ_CASES (of
//! all formats together), FINETUNE_FUZZ_FORMAT (only this one), FINETUNE_FUZZ_CASE (only this case of that format). For
//! long manual runs: benches/fuzz.sh.

#[path = "../gguf/build.rs"]
mod build;
#[path = "../every_message/mod.rs"]
mod every_message;
mod memory;
mod models;
mod mutate;
mod rows;
mod runs;
mod settings;
mod weights;
mod wire;

use finetune::config::refusal::Refusal;
use finetune::support::stderr::printable;
use mutate::Dice;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Files of one input, by their path in the folder of the case; `None`: the file is missing.
pub type Files = Vec<(String, Option<Vec<u8>>)>;

/// A format that the program reads.
pub struct Format {
    /// The name in messages and in FINETUNE_FUZZ_FORMAT.
    pub name: &'static str,
    /// Its share of all cases.
    pub share: u64,
    /// An input that is read without an error.
    pub whole: fn() -> Files,
    /// Returns the files that a case damages.
    pub damage: fn(&mut Dice, &Files) -> Files,
    /// Reads the input in that folder as the program does.
    pub read: fn(&Path) -> Result<(), Refusal>,
}

/// Cases of a run in CI.
const CASES: u64 = 30_000;
/// Bytes that a case may hold in addition to sixteen times its files.
const ROOM: usize = 64 << 20;
/// Upper bound on the time of a case, far above the normal one even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Characters of an error line, including names from a file.
const LONGEST_LINE: usize = 4000;

/// Format and number of the current case, for the messages of the watchdog and the allocator.
static FORMAT: AtomicUsize = AtomicUsize::new(usize::MAX);
static CASE: AtomicU64 = AtomicU64::new(0);
/// True while a reader runs: its panics are failures.
static READS: AtomicBool = AtomicBool::new(false);
static CASES_DONE: AtomicU64 = AtomicU64::new(0);
/// The message of the last panic of any thread.
static PANIC: Mutex<String> = Mutex::new(String::new());

fn formats() -> Vec<&'static Format> {
    [weights::FORMATS, models::FORMATS, runs::FORMATS, settings::FORMATS, rows::FORMATS, wire::FORMATS]
        .into_iter()
        .flatten()
        .collect()
}

/// Prints the current case on stderr; allocates nothing.
fn name_the_case(what: &str) {
    let _ = writeln!(
        std::io::stderr(),
        "mutated_files: format number {}, case {} {what}",
        FORMAT.load(Relaxed),
        CASE.load(Relaxed)
    );
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// A temporary folder, in memory if possible.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn put(folder: &Path, files: &Files) {
    for (name, content) in files {
        let path = folder.join(name);
        match content {
            Some(content) => {
                let kept = std::fs::write(&path, content);
                kept.or_else(|_| {
                    std::fs::create_dir_all(path.parent().unwrap())?;
                    std::fs::write(&path, content)
                })
                .unwrap();
            }
            None => drop(std::fs::remove_file(path)),
        }
    }
}

fn size(files: &Files) -> usize {
    files.iter().filter_map(|(_, content)| content.as_ref()).map(Vec::len).sum()
}

/// Whether the input was read, and the peak of memory; an error describes a violation.
fn verdict(format: &Format, folder: &Path, bytes: usize) -> Result<(bool, usize), String> {
    let before = memory::begin();
    READS.store(true, Relaxed);
    let read = catch_unwind(AssertUnwindSafe(|| (format.read)(folder)));
    READS.store(false, Relaxed);
    let most = memory::most(before);
    let panic = PANIC.lock().unwrap().clone();
    let read = read.map_err(|_| format!("panics: {panic}"))?;
    if most > ROOM + 16 * bytes {
        return Err(format!("holds {most} bytes for {bytes}"));
    }
    if let Err(refusal) = &read {
        let line = printable(&refusal.line);
        let plain = !line.is_empty() && !line.chars().any(|c| c.is_control() && c != '\t');
        if !plain || line.chars().count() > LONGEST_LINE {
            let start: String = line.chars().take(300).collect();
            return Err(format!("is refused with {start:?} ({} characters)", line.chars().count()));
        }
    }
    Ok((read.is_ok(), most))
}

/// The results of the cases of one format.
#[derive(Default)]
struct Tally {
    read: u64,
    refused: u64,
    most: usize,
    seconds: f64,
    /// The slowest case and its seconds.
    slowest: (f64, u64),
    /// Violations, one of each kind, with the path of the saved input.
    wrong: Vec<String>,
}

fn run(index: usize, format: &Format, seed: u64, cases: std::ops::Range<u64>) -> Tally {
    let (folder, mut tally, began) = (folder(), Tally::default(), Instant::now());
    let whole = (format.whole)();
    put(folder.path(), &whole);
    let mut kinds: Vec<String> = Vec::new();
    FORMAT.store(index, Relaxed);
    if let Err(refusal) = (format.read)(folder.path()) {
        panic!("{}: the undamaged input is refused: {refusal}", format.name);
    }
    for case in cases {
        CASE.store(case, Relaxed);
        let mut dice = Dice::new(&[seed, index as u64, case]);
        let damaged = (format.damage)(&mut dice, &whole);
        put(folder.path(), &damaged);
        let began = Instant::now();
        let verdict = verdict(format, folder.path(), size(&damaged) + size(&whole));
        let seconds = began.elapsed().as_secs_f64();
        if seconds > tally.slowest.0 {
            tally.slowest = (seconds, case);
        }
        match verdict {
            Ok((read, most)) => {
                tally.read += u64::from(read);
                tally.refused += u64::from(!read);
                tally.most = tally.most.max(most);
            }
            Err(what) => {
                let kind: String = what.chars().filter(|c| !c.is_ascii_digit()).take(60).collect();
                if !kinds.contains(&kind) && kinds.len() < 20 {
                    kinds.push(kind);
                    let kept = keep(format.name, case, &damaged);
                    tally.wrong.push(format!(
                        "{} {case}: {what}\n    input in {}",
                        format.name,
                        kept.display()
                    ));
                }
            }
        }
        let names: Vec<&String> = damaged.iter().map(|(name, _)| name).collect();
        put(folder.path(), &whole.iter().filter(|(name, _)| names.contains(&name)).cloned().collect());
        let strange = damaged.iter().filter(|(name, _)| !whole.iter().any(|(known, _)| known == name));
        put(folder.path(), &strange.map(|(name, _)| (name.clone(), None)).collect());
        CASES_DONE.fetch_add(1, Relaxed);
    }
    tally.seconds = began.elapsed().as_secs_f64();
    tally
}

/// Saves the input of a failed case.
fn keep(format: &str, case: u64, files: &Files) -> PathBuf {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutated_files").join(format!("{format}-{case}"));
    std::fs::create_dir_all(&to).unwrap();
    put(&to, files);
    to
}

/// Ends the process if a case takes too long, and prints the case.
fn watch(names: Vec<&'static str>, seed: u64) {
    std::thread::spawn(move || {
        let (mut seen, mut since) = (u64::MAX, Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let done = CASES_DONE.load(Relaxed);
            if done != seen {
                (seen, since) = (done, Instant::now());
            } else if since.elapsed() > PATIENCE {
                let (name, case) = (names.get(FORMAT.load(Relaxed)), CASE.load(Relaxed));
                eprintln!("mutated_files: {name:?} case {case} under seed {seed} hangs");
                std::process::exit(1);
            }
        }
    });
}

/// Checks the harness itself: it detects planted violations.
fn checks_itself() {
    let of = |read| Format { name: "itself", share: 1, whole: Vec::new, damage: |_, _| Vec::new(), read };
    let wrong = |read| verdict(&of(read), Path::new("."), 1).unwrap_err();
    assert!(wrong(|_| panic!("planted")).contains("planted"));
    assert!(wrong(|_| Err(Refusal { line: "two\nlines".into(), ..Refusal::failure("") })).contains("two"));
    let long = |_: &Path| Err(Refusal { line: "word".repeat(2000), ..Refusal::failure("") });
    assert!(wrong(long).contains("8000 characters"));
    let holds = wrong(|_| {
        drop(std::hint::black_box(vec![1u8; ROOM + 1000]));
        Ok(())
    });
    assert!(holds.contains("holds"), "{holds}");
}

#[test]
fn damaged_files_are_read_or_refused_in_one_line() {
    let seed = number("FINETUNE_FUZZ_SEED").unwrap_or(1);
    let cases = number("FINETUNE_FUZZ_CASES").unwrap_or(CASES);
    let only = std::env::var("FINETUNE_FUZZ_FORMAT").ok();
    let formats = formats();
    let wanted = |format: &&&Format| only.as_ref().is_none_or(|name| name == format.name);
    assert!(formats.iter().any(|format| wanted(&format)), "there is no format {only:?}");
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| match READS.load(Relaxed) {
        true => *PANIC.lock().unwrap() = info.to_string().replace('\n', "; "),
        false => usual(info),
    }));
    checks_itself();
    watch(formats.iter().map(|format| format.name).collect(), seed);
    println!("seed {seed}, {cases} cases");
    let shares: u64 = formats.iter().filter(wanted).map(|format| format.share).sum();
    let mut wrong = Vec::new();
    for (index, format) in formats.iter().enumerate().filter(|(_, format)| wanted(format)) {
        let count = (cases * format.share).div_ceil(shares);
        let range = number("FINETUNE_FUZZ_CASE").map_or(0..count, |case| case..case + 1);
        let tally = run(index, format, seed, range);
        let done = tally.read + tally.refused;
        println!(
            "{:<12} {:>8} read {:>8} refused {:>3} wrong {:>8.0} cases/s {:>6} KiB at most, case {} {:.3} s",
            format.name,
            tally.read,
            tally.refused,
            tally.wrong.len(),
            done as f64 / tally.seconds,
            tally.most >> 10,
            tally.slowest.1,
            tally.slowest.0,
        );
        if done > 400 {
            let both = tally.read > 0 && tally.refused > 0;
            assert!(both, "{}: the damage is not of both kinds, harmless and not", format.name);
        }
        wrong.extend(tally.wrong);
    }
    assert!(wrong.is_empty(), "under seed {seed}:\n{}", wrong.join("\n"));
}
