//! Checkpoints: a resumed run equals the uninterrupted one to the bit, a damaged or foreign checkpoint is named, and
//! the previous one survives any failure while saving.

mod train_fake;

use finetune::backend::Fault;
use finetune::train::TrainError;
use finetune::train::best::Choice;
use finetune::train::checkpoint::{JOURNAL, find, newest_adapter};
use finetune::train::event::Event;
use finetune::train::stop::{Stop, Urgency};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use train_fake::{Fake, Setup};

const STEPS: u64 = 11;

/// Interrupts a run in its `at`-th forward pass, resumes it, and compares with an uninterrupted run.
fn check(at: usize, urgency: Urgency) {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let reference = Setup::new(STEPS, &Stop::new(), whole.path()).run(&mut Fake::new());

    let stop = Stop::new();
    let mut model = Fake::new();
    model.plant = Some(Box::new(|n, _, _| {
        if n == at {
            stop.ask(urgency);
        }
    }));
    let first = Setup::new(STEPS, &stop, parts.path()).run(&mut model);
    assert!(!first.end.as_ref().unwrap().complete, "forward pass {at}");
    // A run that took no step has nothing to resume from.
    let step = first.end.as_ref().unwrap().state.step;
    assert_eq!(parts.path().join(format!("checkpoint-{step}")).exists(), step > 0, "forward pass {at}");
    let second =
        Setup { resume: step > 0, ..Setup::new(STEPS, &Stop::new(), parts.path()) }.run(&mut Fake::new());
    assert!(second.end.as_ref().unwrap().complete);
    assert_eq!(second.bits(), reference.bits(), "{urgency:?} in forward pass {at}");
    assert_eq!([first.losses(), second.losses()].concat(), reference.losses());

    let last = format!("checkpoint-{STEPS}");
    for file in
        ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "trainer_state.json"]
    {
        let read = |dir: &Path| fs::read(dir.join(&last).join(file)).unwrap();
        assert_eq!(read(whole.path()), read(parts.path()), "{urgency:?} in forward pass {at}: {file}");
    }
}

#[test]
fn a_resumed_run_gives_the_same_bytes() {
    // Four forward passes a step: its first, one within, its last; evaluations follow steps 3, 6, 9.
    for at in [1, 2, 4, 5, 12, 13, 24, 43] {
        check(at, Urgency::Now);
    }
    for at in [1, 12, 17, 40] {
        check(at, Urgency::AfterStep);
    }
}

/// The class that computes is the last one: displays of a single device take its name from there.
#[test]
fn resumed_run_lists_the_current_class_last() {
    let dir = tempfile::tempdir().unwrap();
    let mut said = Vec::new();
    for (steps, class) in ["a", "b", "a"].into_iter().enumerate() {
        let stop = Stop::new();
        let mut model = Fake::new();
        model.class = class;
        // Four forward passes a step: the run ends with its first step.
        model.plant = Some(Box::new(|_, _, _| {
            stop.ask(Urgency::AfterStep);
        }));
        let setup = Setup { resume: steps > 0, ..Setup::new(STEPS, &stop, dir.path()) };
        let outcome = setup.run(&mut model);
        assert_eq!(outcome.end.as_ref().unwrap().state.step, steps as u64 + 1);
        let Event::Run(start) = &outcome.events[0] else { panic!("{:?}", outcome.events[0]) };
        said.push(start.classes.join(" "));
    }
    assert_eq!(said, ["a", "a b", "b a"]);
}

#[test]
fn parameters_and_moments_change_together() {
    let (whole, parts, stop) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Stop::new());
    let reference = Setup::new(STEPS, &Stop::new(), whole.path()).run(&mut Fake::new());
    let mut model = Fake::new();
    // The run sets parameters before its first step; the fourth time is the end of step 3.
    let (mut sets, asked) = (0, &stop);
    model.refuse = Some(Box::new(move || {
        sets += 1;
        if sets < 4 {
            return Ok(());
        }
        asked.ask(Urgency::Now);
        Err(Fault::Device { device: "fake".into(), reason: "planted".into() })
    }));
    let first = Setup::new(STEPS, &stop, parts.path()).run(&mut model);
    // Step 3 was taken before the model refused its parameters.
    assert_eq!(first.end.unwrap().state.step, 3);
    let resumed =
        Setup { resume: true, ..Setup::new(STEPS, &Stop::new(), parts.path()) }.run(&mut Fake::new());
    assert_eq!(resumed.bits(), reference.bits());
}

/// Copies a run's folder as it is now; a file that is moved meanwhile is left out.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to)),
        }
    }
}

/// Whether a folder has a checkpoint.
fn has_state(folder: &Path) -> bool {
    let name = |e: fs::DirEntry| e.file_name().to_string_lossy().starts_with("checkpoint-");
    fs::read_dir(folder).into_iter().flatten().flatten().any(name)
}

/// The folder of a run, copied in the middle of a step, is what a killed process leaves.
#[test]
fn killed_run_goes_on_from_its_journal() {
    let whole = tempfile::tempdir().unwrap();
    let reference = Setup::new(STEPS, &Stop::new(), whole.path()).run(&mut Fake::new());
    for (at, every) in [(5, 0), (22, 0), (41, 0), (22, 2)] {
        let (out, left, stop) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Stop::new());
        let journal = out.path().join(JOURNAL);
        let mut model = Fake::new();
        model.plant = Some(Box::new(|n, _, _| {
            // Until the state of step 1 is written; with later ones the thread is in time or not.
            while n == 5 && !has_state(&journal) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if n == at {
                copy(out.path(), left.path());
            }
        }));
        let setup = |at: &Path| Setup { every, ..Setup::new(STEPS, &stop, at) };
        assert!(setup(out.path()).run(&mut model).end.unwrap().complete);
        drop(model);
        assert!(!journal.exists(), "a checkpoint has the last step");

        let found = find(left.path()).unwrap();
        assert_eq!(found.path.starts_with(left.path().join(JOURNAL)), every == 0, "{}", found.path.display());
        assert_eq!(newest_adapter(left.path()).is_some(), every > 0, "a state of the journal is no adapter");
        assert!(found.step > 0 && found.step < at as u64 / 4 + 1, "{} in forward pass {at}", found.step);
        let resumed = Setup { resume: true, ..setup(left.path()) }.run(&mut Fake::new());
        assert_eq!(resumed.bits(), reference.bits(), "forward pass {at}");
        let losses = reference.losses();
        assert_eq!(resumed.losses(), losses[found.step as usize..]);
        let last = |dir: &Path| fs::read(dir.join(format!("checkpoint-{STEPS}/trainer_state.json"))).unwrap();
        assert_eq!(last(left.path()), last(whole.path()), "forward pass {at}");
    }
}

/// A fault before the first step after a resume must not cost the state that was resumed.
#[test]
fn journal_stays_where_the_resumed_run_saves_nothing() {
    let (out, left, stop) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Stop::new());
    let mut model = Fake::new();
    model.plant = Some(Box::new(|n, _, _| {
        while n == 5 && !has_state(&out.path().join(JOURNAL)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if n == 5 {
            copy(out.path(), left.path());
        }
    }));
    Setup::new(STEPS, &stop, out.path()).run(&mut model);
    let mut broken = Fake::new();
    broken.refuse = Some(Box::new(|| Err(Fault::Device { device: "fake".into(), reason: "planted".into() })));
    let setup = Setup { resume: true, ..Setup::new(STEPS, &stop, left.path()) };
    assert_eq!(setup.run(&mut broken).end.unwrap_err().exit_code(), 1);
    assert_eq!(find(left.path()).unwrap().step, 1);
    let whole = tempfile::tempdir().unwrap();
    let reference = Setup::new(STEPS, &Stop::new(), whole.path()).run(&mut Fake::new());
    assert_eq!(setup.run(&mut Fake::new()).bits(), reference.bits());
}

#[test]
fn journal_that_cannot_be_written_is_named_once() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(JOURNAL), "a file in its place").unwrap();
    let mut model = Fake::new();
    model.plant = Some(Box::new(|_, _, _| std::thread::sleep(Duration::from_millis(5))));
    let outcome = Setup::new(STEPS, &Stop::new(), dir.path()).run(&mut model);
    assert!(outcome.end.as_ref().unwrap().complete);
    let is_said =
        |e: &&Event| matches!(e, Event::Device(c) if c.reason.starts_with("the step journal ends: "));
    assert_eq!(outcome.events.iter().filter(is_said).count(), 1);
}

#[test]
fn leftovers_of_a_killed_run_are_removed() {
    let (out, stop) = (tempfile::tempdir().unwrap(), Stop::new());
    let setup = || Setup { every: 4, ..Setup::new(STEPS, &stop, out.path()) };
    setup().run(&mut Fake::new());
    let at = |name: &str| out.path().join(name);
    fs::rename(at("checkpoint-8"), at(".checkpoint-8.abc.tmp.old")).unwrap();
    fs::create_dir(at(".checkpoint-9.xyz.tmp")).unwrap();
    fs::write(at(".checkpoint-9.xyz.tmp/adapter_model.safetensors"), "half").unwrap();
    // The next checkpoint removes them, too.
    fs::remove_dir_all(at("checkpoint-11")).unwrap();
    assert!(Setup { resume: true, ..setup() }.run(&mut Fake::new()).end.unwrap().complete);
    let mut names: Vec<_> =
        fs::read_dir(out.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["checkpoint-11", "checkpoint-4", "checkpoint-8"]);
}

#[test]
fn damaged_checkpoint_is_skipped_and_named() {
    let out = tempfile::tempdir().unwrap();
    Setup { every: 4, ..Setup::new(STEPS, &Stop::new(), out.path()) }.run(&mut Fake::new());
    let at = |step: u64| out.path().join(format!("checkpoint-{step}"));
    assert_eq!(find(out.path()).unwrap().step, 11);

    let moments = at(11).join("optimizer.safetensors");
    let mut bytes = fs::read(&moments).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&moments, bytes).unwrap();
    let found = find(out.path()).unwrap();
    assert_eq!(found.step, 8);
    assert!(found.passed_over[0].contains("optimizer.safetensors is damaged"), "{:?}", found.passed_over);
    let error = find(&at(11)).unwrap_err();
    assert_eq!(error.exit_code(), 1);

    fs::remove_file(at(8).join("run_state.json")).unwrap();
    fs::remove_file(at(4).join("blake3sums")).unwrap();
    let error = find(out.path()).unwrap_err().to_string();
    assert!(error.contains("no checkpoint is whole"), "{error}");
    let none = find(&out.path().join("nowhere")).unwrap_err().to_string();
    assert!(none.contains("without --resume"), "{none}");
}

#[test]
fn another_configuration_is_refused_by_name() {
    let out = tempfile::tempdir().unwrap();
    Setup { every: 4, ..Setup::new(STEPS, &Stop::new(), out.path()) }.run(&mut Fake::new());
    let stop = Stop::new();
    let setup = Setup { resume: true, peak: 0.01, ..Setup::new(20, &stop, out.path()) };
    let error = setup.run(&mut Fake::new()).end.unwrap_err();
    assert_eq!(error.exit_code(), 78);
    let text = error.to_string();
    assert!(
        text.contains("learning_rate was 0.05, is 0.01; max_steps (or by epochs) was 11, is 20"),
        "{text}"
    );
}

#[test]
fn oldest_checkpoints_are_removed_after_the_new_one() {
    for (limit, want) in [(None, vec![2, 4, 6, 8, 10, 11]), (Some(2), vec![10, 11]), (Some(0), vec![11])] {
        let out = tempfile::tempdir().unwrap();
        Setup { every: 2, limit, ..Setup::new(STEPS, &Stop::new(), out.path()) }.run(&mut Fake::new());
        let mut names: Vec<String> = fs::read_dir(out.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_by_key(|n| (n.len(), n.clone()));
        let want: Vec<String> = want.iter().map(|s| format!("checkpoint-{s}")).collect();
        assert_eq!(names, want, "limit {limit:?}");
    }
}

#[test]
fn requested_checkpoint_does_not_stop_the_run() {
    let (out, stop) = (tempfile::tempdir().unwrap(), Stop::new());
    let mut model = Fake::new();
    model.plant = Some(Box::new(|n, _, _| {
        if n == 6 {
            stop.ask_checkpoint();
        }
    }));
    let outcome = Setup::new(4, &stop, out.path()).run(&mut model);
    assert!(outcome.end.as_ref().unwrap().complete);
    assert_eq!(
        outcome.kinds(),
        "run0 eval0 step1 step2 checkpoint2 step3 eval3 step4 eval4 speed4 checkpoint4"
    );
}

/// A file system of 64 KiB, gone when dropped.
struct Small(PathBuf);

impl Small {
    fn mount(dir: &Path) -> Option<Self> {
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=160k", "tmpfs"])
            .arg(dir)
            .output()
            .is_ok_and(|out| out.status.success());
        mounted.then(|| Small(dir.to_owned()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).output();
    }
}

#[test]
fn a_full_disk_leaves_the_previous_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_small) = Small::mount(dir.path()) else {
        // Not by a macro: the harness captures macro output of tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED: not allowed to mount a tmpfs (run as root)");
        return;
    };
    let filler = dir.path().join("filler");
    let mut model = Fake::new();
    let place = filler.clone();
    // The disk fills up between the checkpoints of steps 2 and 4.
    model.plant = Some(Box::new(move |n, _, _| {
        if n == 13 {
            let mut size = 160 << 10;
            while size > 0 && fs::write(&place, vec![7; size]).is_err() {
                size -= 4096;
            }
        }
    }));
    let stop = Stop::new();
    let setup = Setup { every: 2, limit: Some(1), ..Setup::new(STEPS, &stop, dir.path()) };
    let error = setup.run(&mut model).end.unwrap_err();
    let TrainError::Save { step: 4, kept: Some(kept), .. } = &error else { panic!("{error}") };
    assert_eq!(kept, &dir.path().join("checkpoint-2"));
    let text = error.to_string();
    assert!(text.contains("disk is full") && text.contains("--resume") && !text.contains('\n'), "{text}");
    assert_eq!(error.exit_code(), 1);
    let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.retain(|name| name != JOURNAL);
    left.sort();
    assert_eq!(left, ["checkpoint-2", "filler"], "nothing half-written");

    fs::remove_file(filler).unwrap();
    let resumed = Setup { resume: true, ..setup }.run(&mut Fake::new());
    let whole = tempfile::tempdir().unwrap();
    assert_eq!(resumed.bits(), Setup::new(STEPS, &Stop::new(), whole.path()).run(&mut Fake::new()).bits());
}

/// The loss falls until step 6; no later one is better.
fn best_at_six(step: u64) -> f64 {
    [5.0, 3.0, 2.0, 2.5, 2.0, 2.25][step as usize / 3]
}

fn judged<'a>() -> Fake<'a> {
    let mut model = Fake::new();
    model.score = Some(best_at_six);
    model
}

fn keeps_best<'a>(stop: &'a Stop, output: &Path) -> Setup<'a> {
    let choice = Choice { keep: true, patience: Some(2), ..Choice::default() };
    Setup { choice, every: 4, limit: Some(1), ..Setup::new(30, stop, output) }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}

#[test]
fn best_checkpoint_is_kept_and_the_run_ends_early() {
    let (dir, stop) = (tempfile::tempdir().unwrap(), Stop::new());
    let outcome = keeps_best(&stop, dir.path()).run(&mut judged());
    let want = "run0 eval0 step1 step2 step3 eval3 best3 checkpoint3 step4 checkpoint4 step5 step6 eval6 best6 checkpoint6 \
                step7 step8 speed8 checkpoint8 step9 eval9 step10 step11 step12 eval12 checkpoint12 speed12 early12";
    assert_eq!(outcome.kinds(), want);
    let end = outcome.end.unwrap();
    assert!(
        end.complete && end.state.best.is_some_and(|b| (b.step, b.since) == (6, 2)),
        "{:?}",
        end.state.best
    );
    assert_eq!(names(dir.path()), ["checkpoint-12", "checkpoint-6"], "the limit is 1");
    let state = fs::read_to_string(dir.path().join("checkpoint-12/trainer_state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    assert_eq!((state["best_global_step"].as_u64(), state["best_metric"].as_f64()), (Some(6), Some(2.0)));
    // A finished run reports the same end again.
    let again = Setup { resume: true, ..keeps_best(&stop, dir.path()) }.run(&mut judged());
    assert_eq!(again.kinds(), "run12 best6 early12");
    assert!(again.end.unwrap().complete);
    // With more patience the run has more steps to do.
    let choice = Choice { keep: true, patience: Some(3), ..Choice::default() };
    let longer = Setup { resume: true, choice, ..keeps_best(&stop, dir.path()) }.run(&mut judged());
    assert_eq!(longer.end.unwrap().state.step, 15);
}

/// Wherever the run is interrupted, the resumed run keeps the same adapter and ends after the same step.
#[test]
fn a_resumed_run_knows_the_best_so_far() {
    let whole = tempfile::tempdir().unwrap();
    keeps_best(&Stop::new(), whole.path()).run(&mut judged());
    for (at, urgency) in [
        (3, Urgency::AfterStep),
        (24, Urgency::Now),
        (24, Urgency::AfterStep),
        (26, Urgency::Now),
        (40, Urgency::Now),
    ] {
        let (dir, stop) = (tempfile::tempdir().unwrap(), Stop::new());
        let mut model = judged();
        model.plant = Some(Box::new(|n, _, _| {
            if n == at {
                stop.ask(urgency);
            }
        }));
        assert!(!keeps_best(&stop, dir.path()).run(&mut model).end.unwrap().complete);
        let resumed =
            Setup { resume: true, ..keeps_best(&Stop::new(), dir.path()) }.run(&mut judged()).end.unwrap();
        assert_eq!((resumed.complete, resumed.state.step), (true, 12), "{urgency:?} in forward pass {at}");
        assert_eq!(names(dir.path()), names(whole.path()), "{urgency:?} in forward pass {at}");
        for file in ["checkpoint-6/adapter_model.safetensors", "checkpoint-12/optimizer.safetensors"] {
            let read = |dir: &Path| fs::read(dir.join(file)).unwrap();
            assert_eq!(read(whole.path()), read(dir.path()), "{urgency:?} in forward pass {at}: {file}");
        }
    }
}

#[test]
fn run_without_keep_best_writes_no_best_fields() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = Setup { every: 4, ..Setup::new(8, &Stop::new(), dir.path()) }.run(&mut judged());
    assert!(!outcome.kinds().contains("best"), "{}", outcome.kinds());
    for file in ["run_state.json", "trainer_state.json"] {
        let text = fs::read_to_string(dir.path().join("checkpoint-8").join(file)).unwrap();
        assert!(!text.contains("best"), "{text}");
    }
}
