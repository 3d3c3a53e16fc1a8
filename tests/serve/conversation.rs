//! `finetune chat` with lines from a pipe, and adapters that cannot be open together.

use crate::generated;
use crate::server::adapters;
use crate::tested_adapters;
use std::io::Write;
use std::process::Stdio;

#[test]
fn chat_answers_as_generate_and_switches_adapters() {
    for more in ["", "--quantize q8_0", "--offload 2"] {
        answers_as_generate(&format!("--gpus none {more}"));
    }
}

#[test]
fn chat_on_a_gpu_answers_as_generate() {
    for tested in tested_adapters::all() {
        for more in ["", "--quantize q8_0 --offload 2"] {
            answers_as_generate(&format!("{} {more}", tested.options()));
        }
    }
}

fn answers_as_generate(device: &str) {
    let bench = adapters();
    let flags = format!("{device} --max-new-tokens 8");
    let of = |options: &str| generated(bench, &format!("{options} --chat {flags}"), "Show the branch");
    let (base, a, b) = (of("demo"), of("--adapter a"), of("--adapter b"));
    assert!(base != a && a != b, "{device}: {base:?} {a:?} {b:?}");
    let mut child = bench
        .command(&format!("chat --adapter a --adapter second=b {flags}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let typed = "Show the branch\n/reset\n/adapter base\nShow the branch\n/reset\n/adapter second\nShow the branch\n/compare\n/nothing\n";
    child.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let (shown, said) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{said}");
    let compared = format!("> [base] {base}\n[a] {a}\n[second] {b}\n");
    assert_eq!(shown, format!("> {a}\n> > > {base}\n> > > {b}\n{compared}> > \n"), "{device}");
    assert!(said.contains("there is no /nothing"), "{said}");
}

#[test]
fn adapters_that_differ_are_refused_by_name() {
    let bench = adapters();
    bench.ok("demo --data rows.jsonl --max-steps 1 --rank 4 --gpus none -q -o narrow");
    bench.ok("demo --data rows.jsonl --max-steps 1 --quantize nf4 --gpus none -q -o nf4");
    for verb in ["chat", "serve --bind 127.0.0.1:0"] {
        for (adapters, parts) in [
            ("--adapter a --adapter narrow", ["a has rank 16, alpha 32", "narrow has rank 4, alpha 8"]),
            ("--adapter a --adapter a", ["--adapter", "two adapters have the name a"]),
            ("--adapter base=a", ["--adapter", "needs a name"]),
            ("--adapter a --adapter nf4", ["a and nf4 were trained", "give --quantize"]),
        ] {
            let out = bench.run(&format!("{verb} {adapters} --gpus none"));
            let said = crate::cli_fixture::stderr(&out);
            assert_eq!(out.status.code(), Some(78), "{verb} {adapters}: {said}");
            assert!(parts.iter().all(|part| said.contains(part)), "{verb} {adapters}: {said}");
        }
    }
    let out = bench.run("serve demo --adapter demo=a --gpus none --bind 127.0.0.1:0");
    assert!(crate::cli_fixture::stderr(&out).contains("demo is the name of the model"));
}
