//! Runs and their folders: which run is resumed and where it continues, which files are never touched, the leftovers of
//! a killed run, and a folder that is removed while a run writes to it.
#![cfg(unix)]

mod cli_fixture;

use cli_fixture::{ADAPTER, Bench, rows, stderr};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const RUN: &str = "demo --data rows.jsonl --batch-size 4 --rank 2 --save-steps 2";

/// Exit code and the last line of `finetune {args}`, whose parts are separated by ` .. `.
#[track_caller]
fn check(b: &Bench, args: &str, code: i32, parts: &str) {
    let out = b.run(args);
    let said = stderr(&out);
    assert_eq!(out.status.code(), Some(code), "finetune {args}\n{said}");
    for part in parts.split(" .. ") {
        assert!(said.contains(part), "finetune {args}: {part:?} in\n{said}");
    }
}

/// Every file below `dir` with its bytes.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        match entry.is_dir() {
            true => found.extend(contents(&entry)),
            false => found.push((entry.display().to_string(), fs::read(&entry).unwrap())),
        }
    }
    found.sort();
    found
}

/// Leaves the folder as a run does that was killed after its checkpoint of that step.
fn cut(b: &Bench, dir: &str, step: u64) {
    for entry in fs::read_dir(b.path(dir)).unwrap().map(|e| e.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        match name.strip_prefix("checkpoint-").map(|n| n.parse::<u64>().unwrap()) {
            Some(n) if n > step => fs::remove_dir_all(entry.path()).unwrap(),
            None if name.starts_with("adapter") => fs::remove_file(entry.path()).unwrap(),
            _ => {}
        }
    }
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-r").args([from, to]).status().unwrap();
    assert!(done.success());
}

#[test]
fn resume_touches_no_other_run() {
    let b = Bench::new();
    b.ok(&format!("{RUN} --max-steps 4 -o a -q"));
    b.ok(&format!("{RUN} --max-steps 6 --seed 9 -o b -q"));
    b.file("full/thesis.tex", "x");
    let before = contents(&b.path("b"));
    check(&b, "--resume=a -o b", 78, "error: b: belongs to another run .. --overwrite");
    check(&b, "--resume=a -o full", 78, "full: is not empty and holds no run");
    check(&b, "--resume=a -o full --overwrite", 78, "full: is not empty and holds no run");
    for same in
        ["--resume=a --overwrite", "--resume=a/checkpoint-2 -o ./a --overwrite", "--resume -o a --overwrite"]
    {
        check(&b, same, 78, "either --resume or --overwrite");
    }
    // Refused after the folder was moved aside: the folder is moved back.
    check(&b, "--resume=a -o b --overwrite --log-json no/log.jsonl", 1, "no/log.jsonl");
    assert!(contents(&b.path("b")) == before, "b was touched");
    b.ok("--resume=a -o b --overwrite -q");
    assert!(b.read(&format!("a/{ADAPTER}")) == b.read(&format!("b/{ADAPTER}")));
    let yaml = String::from_utf8(b.read("b/run.yaml")).unwrap();
    assert!(yaml.contains("seed: 42 ") && !b.path("b/checkpoint-6").exists(), "{yaml}");
}

#[test]
fn run_resumes_in_a_moved_or_copied_folder() {
    let b = Bench::new();
    b.model("base");
    b.file("chat.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    b.ok("./base --data rows.jsonl --max-steps 1 --rank 2 -q -o init");
    let run = "./base --data rows.jsonl --eval-data eval.jsonl --init-adapter init --chat-template chat.jinja \
               --max-steps 6 --batch-size 4 --save-steps 2 --log-json log.jsonl --tensorboard tb -q -o a";
    b.ok(run);
    let whole = b.read(&format!("a/{ADAPTER}"));
    cut(&b, "a", 2);
    let stopped = contents(&b.path("a"));
    fs::create_dir(b.path("sub")).unwrap();
    copy(&b.path("a"), &b.path("copied"));
    copy(&b.path("a"), &b.path("sub/moved"));
    let resumed = |from: &str, args: &str, dir: &str| {
        let out = b.command(args).current_dir(b.path(from)).output().unwrap();
        assert!(out.status.success(), "{from}: {args}: {}", stderr(&out));
        assert!(b.read(&format!("{dir}/{ADAPTER}")) == whole, "{from}: {args}");
        assert!(b.path(&format!("{dir}/run.yaml")).exists() && !b.path(&format!("{dir}/run.lock")).exists());
    };
    resumed(".", "--resume=copied -q", "copied");
    resumed("sub", "--resume=moved -q", "sub/moved");
    resumed("sub", "--resume=../a -o new -q", "sub/new");
    assert!(!b.path("sub/a").exists() && !b.path("sub/log.jsonl").exists() && !b.path("sub/tb").exists());
    // A run resumed in a new folder has the whole log, and can be resumed again.
    let log = String::from_utf8(b.read("sub/new/metrics.jsonl")).unwrap();
    assert_eq!(
        log.matches("\"event\":\"step\"").count(),
        4,
        "the log of the first steps was kept elsewhere\n{log}"
    );
    cut(&b, "sub/new", 4);
    resumed("/", &format!("--resume={} -q", b.path("sub/new").display()), "sub/new");
    assert!(contents(&b.path("a")) == stopped, "what was copied and resumed elsewhere was touched");
    resumed("sub", "--resume ../a -q", "a");
    let log = String::from_utf8(b.read("log.jsonl")).unwrap();
    assert_eq!(log.matches("\"event\":\"step\"").count(), 6);
}

#[test]
fn concurrent_runs_take_separate_folders() {
    let b = Bench::new();
    let start = |_| b.start("demo --data rows.jsonl --max-steps 1 --rank 2 --threads 1 -q");
    let runs: Vec<Child> = (0..4).map(start).collect();
    for run in runs {
        let out = run.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
    }
    for n in 1..=4 {
        assert!(b.path(&format!("runs/demo-{n}/{ADAPTER}")).exists(), "{n}");
    }
    assert_eq!(fs::read_dir(b.path("runs")).unwrap().count(), 4);
}

#[test]
fn run_killed_before_a_checkpoint_starts_over() {
    let b = Bench::new();
    let run = format!("{RUN} --max-steps 3");
    b.ok(&format!("{run} -q -o whole"));
    let whole = b.read(&format!("whole/{ADAPTER}"));
    let note = "the run begins again at step 0";
    let resumed = |args: &str| {
        check(&b, &format!("{run} -o out {args}"), 0, if args == "--resume" { note } else { "adapter  out" });
        assert!(b.read(&format!("out/{ADAPTER}")) == whole);
        assert!(!b.path("out/run.lock").exists() && !b.path("out/.previous").exists());
        fs::remove_dir_all(b.path("out")).unwrap();
    };
    resumed("--resume");
    for args in ["", "--resume", "--overwrite"] {
        b.file("out/run.lock", "");
        b.file("out/.run.yaml.x7.tmp", "half");
        resumed(args);
    }
    // Killed between its first step and its first checkpoint, and while it was about to replace another run.
    b.file("out/run.yaml", "model:\n");
    b.file("out/metrics.jsonl", "");
    resumed("--resume");
    b.file("out/.previous/run.yaml", "model:\n");
    resumed("--resume");
    b.file("out/run.yaml", "model:\n");
    check(&b, &format!("{run} --resume=out -o other"), 1, "out: no checkpoint-N here to resume from");
    b.file("full/thesis.tex", "x");
    check(&b, &format!("{run} -o full --resume"), 78, "full: is not empty and holds no run");
    check(&b, &format!("{run} -o rows.jsonl --resume"), 1, "rows.jsonl");
    // Damage is reported, and does not restart the run.
    fs::write(b.path("whole/checkpoint-2/optimizer.safetensors"), "x").unwrap();
    fs::remove_dir_all(b.path("whole/checkpoint-3")).unwrap();
    check(
        &b,
        "--resume=whole",
        1,
        "whole: no checkpoint is whole .. optimizer.safetensors is damaged .. --overwrite",
    );
}

/// The run that --overwrite replaces is restored if the new one took no step.
#[test]
fn a_stop_before_the_first_step_keeps_the_replaced_run() {
    let b = Bench::new();
    b.ok(&format!("{RUN} --max-steps 4 -q -o out"));
    let before = contents(&b.path("out"));
    // The first evaluation takes long enough for the signal to arrive within it.
    b.file("long.jsonl", &rows(6000));
    let run = format!("{RUN} --max-steps 9 --eval-data long.jsonl --threads 1 -q -o out --overwrite");
    let child = b.start(&run);
    let began = Instant::now();
    while !b.path("out/run.yaml").exists() || !b.path("out/.previous/run.yaml").exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "it never began");
        std::thread::sleep(Duration::from_millis(5));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    let out = child.wait_with_output().unwrap();
    let said = stderr(&out);
    assert_eq!(out.status.code(), Some(75), "{said}");
    assert!(said.contains("before the first step: nothing is saved"), "{said}");
    assert!(contents(&b.path("out")) == before);
}

/// Without checkpoints, a finished run is not trained again under its adapter.
#[test]
fn a_finished_run_without_checkpoints_is_not_resumed() {
    let b = Bench::new();
    b.ok(&format!("{RUN} --max-steps 4 -q -o out"));
    for step in [2, 4] {
        fs::remove_dir_all(b.path(&format!("out/checkpoint-{step}"))).unwrap();
    }
    let before = contents(&b.path("out"));
    check(&b, "--resume=out", 1, "out: no checkpoint-N here to resume from");
    assert!(contents(&b.path("out")) == before);
}

/// A checkpoint whose checksums are right and whose step is not.
#[test]
fn impossible_step_is_refused_by_name() {
    let b = Bench::new();
    b.ok(&format!("{RUN} --max-steps 4 -q -o out"));
    cut(&b, "out", 4);
    let set_step = |dir: &str, step: u64| {
        let state = b.path(&format!("{dir}/run_state.json"));
        let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
        value["step"] = step.into();
        fs::write(&state, value.to_string()).unwrap();
        let sums = String::from_utf8(b.read(&format!("{dir}/blake3sums"))).unwrap();
        let sums = sums.lines().map(|line| match line.ends_with("  run_state.json") {
            true => format!("{}  run_state.json\n", blake3::hash(&fs::read(&state).unwrap()).to_hex()),
            false => format!("{line}\n"),
        });
        b.file(&format!("{dir}/blake3sums"), &sums.collect::<String>());
    };
    set_step("out/checkpoint-4", 3);
    check(&b, "--resume=out/checkpoint-4", 1, "run_state.json is of step 3, the folder's name says 4");
    check(&b, "--resume=out", 0, "warning: out/checkpoint-4: run_state.json is of step 3");
    fs::rename(b.path("out/checkpoint-4"), b.path("out/checkpoint-9")).unwrap();
    set_step("out/checkpoint-9", 9);
    check(&b, "--resume=out", 1, "out/checkpoint-9: is of step 9, beyond the 4 steps of the run");
}

#[test]
fn deleted_output_folder_is_not_created_again() {
    for (way, left) in [("remove", 0), ("empty", 0), ("move", 1), ("replace", 1)] {
        let b = Bench::new();
        b.file("many.jsonl", &rows(400));
        let mut run = b.start(
            "demo --data many.jsonl --batch-size 4 --epochs 1000 --save-steps 0 -o out --log-json log.jsonl",
        );
        let began = Instant::now();
        while !fs::read_to_string(b.path("log.jsonl")).unwrap_or_default().contains("\"event\":\"step\"") {
            assert!(run.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(120));
            std::thread::sleep(Duration::from_millis(5));
        }
        // The next state of the step journal is written about a second later.
        let is_state = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("checkpoint-");
        while !fs::read_dir(b.path("out/journal")).into_iter().flatten().flatten().any(is_state) {
            assert!(run.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(120));
            std::thread::sleep(Duration::from_millis(5));
        }
        match way {
            "remove" => fs::remove_dir_all(b.path("out")).unwrap(),
            // As if a checkpoint is being written while all files are removed.
            "empty" => {
                ["run.yaml", "run.lock"].iter().for_each(|f| fs::remove_file(b.path("out").join(f)).unwrap())
            }
            _ => fs::rename(b.path("out"), b.path("elsewhere")).unwrap(),
        }
        if way == "replace" {
            b.file("out/run.yaml", "another's");
        }
        let sent = Command::new("kill").args(["-USR1", &run.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let out = run.wait_with_output().unwrap();
        let said = stderr(&out);
        let last = said.lines().last().unwrap_or_default();
        assert_eq!(out.status.code(), Some(1), "{way}: {said}");
        assert!(
            last.starts_with("error: out: this folder, or the run.lock in it, was removed"),
            "{way}: {said}"
        );
        // The step journal was there before.
        let counts = |name: &std::ffi::OsStr| way != "empty" || name != "journal";
        let entries = fs::read_dir(b.path("out")).into_iter().flatten().flatten();
        let there = entries.filter(|entry| counts(&entry.file_name())).count();
        assert_eq!(there, usize::from(way == "replace"), "{way}: written where the folder was");
        assert_eq!(usize::from(b.path("elsewhere/run.yaml").exists()), left, "{way}");
    }
}

/// The final lines cover the whole run, including the steps before the resume.
#[test]
fn summary_of_a_resumed_run_covers_all_steps() {
    let b = Bench::new();
    let summary = |said: &str| -> Vec<String> {
        let wanted = |l: &&str| l.starts_with("loss  ") || l.starts_with("eval  ");
        said.lines().filter(wanted).map(str::to_string).collect()
    };
    let whole = summary(&stderr(&b.run(&format!("{RUN} --eval-data eval.jsonl --max-steps 6 -o out"))));
    assert_eq!(whole.len(), 2, "{whole:?}");
    cut(&b, "out", 4);
    copy(&b.path("out"), &b.path("from"));
    assert_eq!(summary(&stderr(&b.run("--resume=out"))), whole);
    assert_eq!(summary(&stderr(&b.run("--resume=from -o to"))), whole, "also in another folder");
    // A pipe cannot be read back, and nothing replaces it.
    let log = b.ok("--resume=from -o piped --log-json /dev/stdout --tensorboard board -q");
    assert!(log.lines().last().is_some_and(|line| line.contains("\"event\":\"done\"")), "{log}");
    b.ok("--resume=piped --tensorboard board -q");
}

#[test]
fn common_resume_and_output_mistakes_get_hints() {
    let b = Bench::new();
    b.ok(&format!("{RUN} --max-steps 4 -q"));
    // A blank instead of `=`.
    cut(&b, "runs/demo-1", 2);
    b.ok("--resume runs/demo-1");
    assert!(b.path(&format!("runs/demo-1/{ADAPTER}")).exists());
    check(
        &b,
        &format!("{RUN} --max-steps 1 --dashboard 127.0.0.1:0"),
        0,
        "page     http://127.0.0.1: .. adapter  runs/demo-2",
    );
    // A resume with more steps than the run had.
    let way = "max_steps (or by epochs) was 4, is 9 .. --init-adapter runs/demo-1/checkpoint-4";
    check(&b, "--resume=runs/demo-1 --max-steps 9", 78, way);
    let way = "max_steps (or by epochs) was 4, is 100 .. warmup_steps was .. --init-adapter runs/demo-1/checkpoint-4";
    check(&b, "--resume=runs/demo-1 --max-steps 100", 78, way);
    b.ok(&format!("{RUN} --max-steps 1 --init-adapter runs/demo-1/checkpoint-4 -q"));
    // The stopped run is used nevertheless.
    cut(&b, "runs/demo-1", 2);
    for verb in [
        "generate --prompt x --adapter runs/demo-1",
        "export runs/demo-1",
        "demo --data rows.jsonl --init-adapter runs/demo-1",
    ] {
        check(&b, verb, 78, "runs/demo-1: the run is not complete .. runs/demo-1/checkpoint-2");
    }
    // A page that cannot be served; run.yaml keeps its flag.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("--dashboard=127.0.0.1:{}", taken.local_addr().unwrap().port());
    check(
        &b,
        &format!("{RUN} --max-steps 1 -o paged {at}"),
        0,
        "warning: no page is shown: --dashboard .. adapter  paged",
    );
    b.file("rufus.gguf", "");
    check(&b, "export paged --to gguf-lora -o rufus.gguf", 78, "rufus.gguf: already exists");
    // Setting a token keeps a copy of the old one.
    let set = |token: &str| {
        let mut command = b.command("token --set --token-file token");
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), token.as_bytes()).unwrap();
        stderr(&child.wait_with_output().unwrap())
    };
    let first = b.ok("token --token-file token");
    let second = b.ok("token --token-file other");
    let said = set(&second);
    assert!(said.contains("another token was there: it is kept as token.before-1"), "{said}");
    assert_eq!((b.read("token"), b.read("token.before-1")), (second.into(), first.into()));
}
