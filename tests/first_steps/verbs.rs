//! Verbs that explain and inspect.

use crate::cli_fixture::Bench;
use serde_json::Value;

/// Exit code, stdout, stderr.
fn run(bench: &Bench, args: &[&str]) -> (i32, String, String) {
    let output = bench.command("").args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn check(bench: &Bench, args: &[&str], (code, out, err): (i32, &str, &str)) {
    let (got, stdout, stderr) = run(bench, args);
    let said = format!("{args:?}\n{stdout}\n{stderr}");
    assert_eq!(got, code, "{said}");
    assert!(stdout.contains(out), "{out} in {said}");
    assert!(stderr.contains(err), "{err} in {said}");
    if code != 0 {
        let errors = stderr.lines().filter(|l| l.starts_with("error: ")).count();
        assert!(errors == 1 && stderr.lines().last().unwrap().starts_with("error: "), "{said}");
    }
}

#[test]
fn help_has_topics_and_is_short() {
    let bench = Bench::new();
    check(&bench, &["help"], (0, "cluster", ""));
    check(&bench, &["help", "data"], (0, "--data-fields", ""));
    check(&bench, &["help", "cluster"], (0, "--expect-workers", ""));
    check(&bench, &["help", "generate"], (0, "--max-new-tokens", ""));
    check(&bench, &["help", "lora_r"], (0, "lora_r is rank here\n--rank: ", ""));
    check(&bench, &["help", "temperature"], (0, "an option of generate, chat", ""));
    check(&bench, &["help", "output"], (0, "what a run writes", ""));
    check(&bench, &["help", "DPO"], (0, "DPO is mentioned in:\n", ""));
    check(&bench, &["help", "worker"], (0, "  finetune help cluster ", ""));
    check(&bench, &["help", "blue"], (2, "", "no help on \"blue\": `finetune help` lists"));
    check(&bench, &["--help"], (0, "Usage: finetune [MODEL] [OPTIONS]", ""));
    check(&bench, &["help", "exit-codes"], (0, "130", ""));
    check(&bench, &["help", "exit-codes"], (0, "141", ""));
    check(&bench, &["help", "model"], (0, "--outtype", ""));
    check(&bench, &["help", "rank"], (0, "in a YAML file: rank", ""));
    check(&bench, &["help", "clutser"], (2, "", "did you mean `finetune help cluster`?"));
    let (_, short, _) = run(&bench, &["--help"]);
    let (_, all, _) = run(&bench, &["help", "options"]);
    assert!(short.lines().count() < 85 && all.lines().count() > short.lines().count(), "{short}");
    assert!(
        short.contains("--rank") && !short.contains("--class-weights") && all.contains("--class-weights")
    );
    assert!(short.find("verbs:").is_some() && short.contains("finetune help options"));
    // An option that the help does not list still exists.
    check(&bench, &["demo", "--class-weights", "1", "--data", "rows.jsonl"], (78, "", "--task classify"));
}

#[test]
fn completions_and_man_pages_are_printed() {
    let bench = Bench::new();
    check(&bench, &["completions", "bash"], (0, "--learning-rate", ""));
    check(&bench, &["completions", "zsh"], (0, "#compdef finetune", ""));
    check(&bench, &["completions", "tcsh"], (2, "", "bash, zsh, fish"));
    check(&bench, &["completions"], (2, "", "for which shell?"));
    check(&bench, &["man"], (0, ".TH finetune 1", ""));
    check(&bench, &["man", "pages"], (0, "pages", ""));
    let made = std::fs::read_dir(bench.path("pages")).unwrap().count();
    assert!(made > 15 && bench.path("pages/finetune-doctor.1").exists(), "{made}");
}

#[test]
fn bash_loads_its_completions() {
    let bench = Bench::new();
    let (_, script, _) = run(&bench, &["completions", "bash"]);
    bench.file("finetune.bash", &script);
    let asks = "source finetune.bash; COMP_WORDS=(finetune --quantize ''); COMP_CWORD=2; \
                _finetune finetune '' --quantize; echo \"${COMPREPLY[*]}\"";
    match std::process::Command::new("bash").current_dir(bench.path("")).args(["-c", asks]).output() {
        Ok(said) => assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "none nf4 nf4-double q8_0"),
        Err(_) => eprintln!("skipped: no bash"),
    }
}

#[test]
fn doctor_names_problems_and_fixes() {
    let bench = Bench::new();
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let file = |text: &str| bench.file("needs.yaml", text).display().to_string();
    let easy = file("- {check: files, about: files, required: true, at_least: 8, fix: ulimit -n 8}\n");
    check(&bench, &["doctor", &easy], (0, "ok       files", ""));
    let hard = file(&format!(
        "- {{check: disk, about: room for everything, required: true, at_least: 900000TB, fix: buy a disk}}\n\
         - {{check: port, about: a port, required: false, port: {port}, fix: \"use :9001\"}}\n"
    ));
    check(&bench, &["doctor", &hard], (78, "", "at_least \"900000TB\" is no size"));
    let hard = file(&format!(
        "- {{check: disk, about: room for everything, required: true, at_least: 900000000GB, fix: buy a disk}}\n\
         - {{check: port, about: a port, required: false, port: {port}, fix: \"use :9001\"}}\n"
    ));
    check(&bench, &["doctor", &hard], (1, "buy a disk", "requirements that are not met: 1 of 2 (disk)"));
    check(&bench, &["doctor", &hard], (1, "use :9001", ""));
    let (_, json, _) = run(&bench, &["doctor", &hard, "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["met"], false);
    assert_eq!(
        (&json["checks"][0]["verdict"], &json["checks"][1]["verdict"]),
        (&"failed".into(), &"warning".into())
    );
    let own = run(&bench, &["doctor", "--json"]).1;
    let own: Value = serde_json::from_str(&own).unwrap();
    let checks = own["checks"].as_array().unwrap();
    assert!(checks.len() >= 9, "{own}");
    let fixed = |c: &&Value| c["verdict"] == "ok" || c["verdict"] == "skipped" || !c["fix"].is_null();
    assert!(checks.iter().all(|c| fixed(&c)), "{own}");
    check(&bench, &["doctor", "nowhere.yaml"], (1, "", "nowhere.yaml"));
}

#[test]
fn import_writes_a_configuration_that_runs() {
    let bench = Bench::new();
    bench.file(
        "theirs.yml",
        "base_model: demo\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\nsequence_len: 256\nadapter: lora\n\
         lora_r: 4\nlora_alpha: 8\nlora_target_linear: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\n\
         max_steps: 2\nlearning_rate: 0.001\nlr_scheduler: cosine\nwarmup_ratio: 0.5\nplugins: [x]\n",
    );
    check(&bench, &["import", "theirs.yml"], (0, "rank: 4  # lora_r", "not carried over: plugins: x: "));
    check(&bench, &["import", "theirs.yml", "-o", "ours.yaml"], (0, "ours.yaml", ""));
    let ours = String::from_utf8(bench.read("ours.yaml")).unwrap();
    assert!(ours.contains("# plugins: x: "), "{ours}");
    check(&bench, &["--config", "ours.yaml", "--gpus", "none", "-o", "out"], (0, "", "2 of 2 steps"));
    check(&bench, &["import"], (2, "", "nothing to import"));
    check(&bench, &["import", "nowhere.yml"], (1, "", "nowhere.yml"));
    check(&bench, &["import", "rows.jsonl"], (78, "", "rows.jsonl"));
}

#[test]
fn inspect_warns_of_untrainable_and_endless_rows() {
    let bench = Bench::new();
    let row = |i: usize, answer: &str| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"ask {i}\"}},{{\"role\":\"{answer}\",\"content\":\"say {i}\"}}]}}\n"
        )
    };
    let rows: String = (0..24).map(|i| row(i, if i % 8 == 5 { "user" } else { "assistant" })).collect();
    bench.file("chat.jsonl", &rows);
    let inspect = ["inspect", "chat.jsonl", "--model", "demo"];
    check(
        &bench,
        &inspect,
        (
            0,
            "nothing to train on in 3 of 24 rows (12 %) (first: chat.jsonl:6: no message has the role assistant",
            "",
        ),
    );
    let with = |more: &[&'static str]| [&inspect[..], more].concat();
    check(&bench, &with(&["--max-dropped", "12.5%"]), (0, "longest", ""));
    check(
        &bench,
        &with(&["--max-dropped", "12%"]),
        (
            1,
            "",
            "3 of 24 rows have nothing to train on (first: chat.jsonl:6: no message has the role assistant",
        ),
    );
    check(&bench, &with(&["--max-dropped", "2"]), (1, "", "--max-dropped allows 2"));
    // The same limit stops a training run before anything is written.
    let train = ["demo", "--data", "chat.jsonl", "--gpus", "none", "--max-dropped", "2", "-o", "out"];
    check(&bench, &train, (1, "", "3 of 24 rows have nothing to train on"));
    assert!(!bench.path("out").exists());
    // A template that never ends a turn gives no end token to train on.
    let endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    bench.file("endless.jinja", endless);
    let said = "no end token is trained on in 21 of 21 rows (100 %)";
    check(&bench, &with(&["--chat-template", "endless.jinja"]), (0, said, ""));
    let (_, json, _) = run(&bench, &with(&["--json", "--rows", "1"]));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["warnings"].as_array().unwrap().len(), 1, "{json}");
    assert_eq!(json["rows_shown"][0]["pieces"][1]["supervised"], true, "{json}");
}

/// A row may set a window title or clear a terminal: its control characters are printed escaped.
#[test]
fn control_characters_of_rows_are_escaped() {
    let bench = Bench::new();
    let row = r#"{"prompt": "a\u001b]0;title\u0007", "completion": "b\u001b[2Jc"}"#;
    bench.file("bad.jsonl", &format!("{row}\n{row}\n"));
    let (code, out, err) = run(&bench, &["inspect", "bad.jsonl", "--model", "demo"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains(r"a\u{1b}]0;title\u{7}") && out.contains(r"b\u{1b}[2Jc"), "{out}");
    assert!(!out.contains(|c: char| c.is_control() && c != '\n'), "{out:?}");
    let labelled =
        r#"{"text": "a", "label": "x\u001b[2J"}"#.to_string() + "\n" + r#"{"text": "b", "label": "y"}"#;
    bench.file("labels.jsonl", &labelled);
    let (code, out, err) = run(&bench, &["inspect", "labels.jsonl", "--model", "demo", "--task", "classify"]);
    assert!(code == 0 && out.contains(r"x\u{1b}[2J") && !out.contains('\u{1b}'), "{out:?}{err}");
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let bench = Bench::new();
    let Ok(full) = std::fs::File::create("/dev/full") else { return eprintln!("skipped: no /dev/full") };
    let output = bench.command("--help").stdout(full).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.starts_with("error: stdout: "), "{said}");
}

/// In the layout of LLaMA-Factory: rows and their names in `data`, the YAML in another folder, {from, value} turns.
#[test]
fn imported_configuration_can_be_planned() {
    let bench = Bench::new();
    let row =
        r#"{"conversations": [{"from": "human", "value": "List files"}, {"from": "gpt", "value": "ls"}]}"#;
    bench.file("data/mine.jsonl", &format!("{row}\n{}\n", row.replace("ls", "ls -a")));
    let info = r#"{"mine": {"file_name": "mine.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations"}}}"#;
    bench.file("data/dataset_info.json", info);
    let theirs =
        "model_name_or_path: demo\nstage: sft\nfinetuning_type: lora\ndataset: mine\ncutoff_len: 256\n";
    bench.file("examples/x/theirs.yaml", theirs);
    check(&bench, &["import", "examples/x/theirs.yaml", "-o", "ours.yaml"], (0, "ours.yaml", ""));
    let (code, out, err) = run(&bench, &["plan", "--config", "ours.yaml", "--gpus", "none", "--json"]);
    assert_eq!(code, 0, "{err}");
    let plan: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plan["rows"]["read"], 2, "{out}");
}
