//! Bounds on one row, one chat template and one tokenizer.json: the kept tokens equal those of the whole text, and
//! input that multiplies or never ends gives one line with its file and line.

mod cli_fixture;

use cli_fixture::{Bench, demo, stderr};
use finetune::data::Tokenizer;
use finetune::data::tokenizer::Special;
use serde_json::{Value, json};
use std::path::Path;

fn tokenizer(path: &Path) -> Tokenizer {
    let json = std::fs::read_to_string(path).unwrap();
    Tokenizer::new(&json, None, None, None).unwrap()
}

/// Repeats a text up to about this many bytes.
fn repeated(text: &str, bytes: usize) -> String {
    text.repeat(bytes.div_ceil(text.len()))
}

/// A text without a period: words of a seeded generator, with numbers, punctuation and white space of all lengths.
fn mixed(bytes: usize) -> String {
    let words =
        ["don't", "l'été", "12345", "  ", "\n\n", "世界", "🦀", "a", "international", "==", "\t", "ß"];
    let (mut out, mut state) = (String::new(), 7u32);
    while out.len() < bytes {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        out += words[(state >> 16) as usize % words.len()];
        out.push_str([" ", "", "\n"][(state >> 8) as usize % 3]);
    }
    out
}

/// Checks that the first `most` tokens equal those of the whole text. Returns whether the end was not tokenised.
fn check(tokenizer: &Tokenizer, text: &str, most: usize) -> bool {
    let whole = tokenizer.encode_with_offsets(text, Special::Add).unwrap();
    let ids = tokenizer.beginning(text, Special::Add, most).unwrap();
    let with = tokenizer.beginning_with_offsets(text, Special::Add, most).unwrap();
    let about = format!("{} bytes {:?}, first {most}", text.len(), &text[..text.floor_char_boundary(20)]);
    assert_eq!(ids, with.ids, "{about}");
    let kept = most.min(whole.ids.len());
    assert_eq!(whole.ids.len() > most, ids.len() > most, "{about}");
    assert_eq!(ids[..kept], whole.ids[..kept], "{about}");
    assert_eq!(with.offsets[..kept], whole.offsets[..kept], "{about}");
    ids.len() < whole.ids.len()
}

#[test]
fn kept_tokens_equal_those_of_the_whole_text() {
    for path in [
        demo().join("model/tokenizer.json"),
        "tests/golden/rows/bytes.json".into(),
        "tests/golden/rows/pieces.json".into(),
        "tests/golden/quantised/nf4/model/tokenizer.json".into(),
    ] {
        let tokenizer = tokenizer(&path);
        let words = path.ends_with("nf4/model/tokenizer.json");
        let mut cut = 0;
        for text in ["lorem ipsum dolor, ", "a", " ", "0", "<|im_end|>", "été ", "\n\n x", "世界"] {
            for (bytes, most) in [(1_000, 64), (80_000, 7), (100_000, 512), (150_000, 2048)] {
                cut += usize::from(check(&tokenizer, &repeated(text, bytes), most));
            }
        }
        for (bytes, most) in [(60_000, 100), (65_537, 100), (70_000, 100), (100_000, 4096), (200_000, 12_000)]
        {
            cut += usize::from(check(&tokenizer, &mixed(bytes), most));
        }
        // A tokenizer that makes one token of a whole text gives no token before the end of the text.
        assert_eq!(cut > 20, !words, "{}: {cut} texts were cut", path.display());
    }
}

#[test]
fn a_text_without_tokens_at_its_beginning_is_refused() {
    let tokenizer = tokenizer(Path::new("tests/golden/quantised/nf4/model/tokenizer.json"));
    let error = tokenizer.beginning(&repeated("a", 3_000_000), Special::Add, 512).unwrap_err().to_string();
    assert!(error.contains("first 512 tokens") && error.contains("split the text"), "{error}");
}

/// Runs `finetune {command}` under a limit of address space: exit code and parts of the last line.
#[track_caller]
fn ends(bench: &Bench, command: &str, code: i32, parts: &[&str]) -> String {
    ends_within(bench, 3_000_000, command, code, parts)
}

/// The same under a limit of this many kilobytes.
#[track_caller]
fn ends_within(bench: &Bench, kilobytes: u64, command: &str, code: i32, parts: &[&str]) -> String {
    let inner = bench.command(command);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", &format!("ulimit -v {kilobytes}; exec \"$@\""), "sh"]).arg(inner.get_program());
    limited.args(inner.get_args()).current_dir(inner.get_current_dir().unwrap());
    inner.get_envs().for_each(|(name, value)| match value {
        Some(value) => drop(limited.env(name, value)),
        None => drop(limited.env_remove(name)),
    });
    let out = limited.stdin(std::process::Stdio::null()).output().unwrap();
    let (text, said) = (stderr(&out), String::from_utf8_lossy(&out.stdout).into_owned());
    assert_eq!(out.status.code(), Some(code), "finetune {command}\n{text}{said}");
    let last = text.lines().last().unwrap_or_default();
    for part in parts {
        assert!(last.contains(part) || (code == 0 && said.contains(part)), "{part:?} in\n{text}{said}");
    }
    for word in ["panicked", "internal error", "memory allocation"] {
        assert!(!text.contains(word), "{text}");
    }
    said
}

#[test]
fn long_row_costs_only_its_kept_tokens() {
    let b = Bench::new();
    let small = "{\"prompt\":\"p\",\"completion\":\"c\"}\n";
    for text in ["lorem ipsum ", "a"] {
        let row = format!("{{\"prompt\":\"p\",\"completion\":\"{}\"}}\n{small}", repeated(text, 100_000_000));
        b.file("long.jsonl", &row);
        let said = ends_within(
            &b,
            1_000_000,
            "inspect long.jsonl --model demo --rows 0 --json",
            0,
            &["\"truncated\":1", "\"rows\":2"],
        );
        let facts: Value = serde_json::from_str(&said).unwrap();
        assert!(facts["longest"][0].as_str().unwrap().contains("(512 tokens)"), "{said}");
    }
    let turns = |n: usize| -> Vec<Value> {
        let turn = |i: usize| json!({"role": (["user", "assistant"][i % 2]), "content": format!("turn {i}")});
        (0..n).map(turn).collect()
    };
    // Turns beyond the kept tokens are not searched one by one.
    b.file("talk.jsonl", &format!("{}\n", json!({"messages": turns(20_000)})));
    b.file("plain.jinja", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
    let command = "inspect talk.jsonl --model demo --chat-template plain.jinja --rows 0 --json";
    ends(&b, command, 0, &["\"truncated\":1"]);
}

#[cfg(unix)]
#[test]
fn a_row_without_an_end_is_refused() {
    let b = Bench::new();
    for name in ["z.jsonl", "z.csv"] {
        std::os::unix::fs::symlink("/dev/zero", b.path(name)).unwrap();
        ends(&b, &format!("inspect {name}"), 1, &[&format!("{name}:1: the row is longer than 268 MB")]);
    }
    b.file("long.json", &format!("[{{\"text\": \"a\"}}, {{\"text\": \"{}\"}}]", "b".repeat(270 << 20)));
    ends(&b, "inspect long.json", 1, &["long.json row 2: the row is longer than 268 MB"]);
}

#[test]
fn chat_templates_are_bounded() {
    let b = Bench::new();
    b.file(
        "chat.jsonl",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n",
    );
    let loops = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    for (template, part) in [
        (loops.to_string(), "runs more than 5 million instructions"),
        ("{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}".into(), "MB of memory"),
        ("{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | list | length }}".into(), "MB of memory"),
        ("{{ '%1000000000d' | format(1) }}".into(), "MB of memory"),
        ("{{ 'x' | indent(10000000000) }}".into(), ""),
        ("{{ 'x' * 10000000000 }}".into(), "repeated string is too large"),
        ("{{ messages | tojson(indent=1000000000) }}".into(), "MB of memory"),
        (format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "y".repeat(20_000)), "MB of memory"),
    ] {
        b.file("evil.jinja", &template);
        let command = "inspect chat.jsonl --model demo --chat-template evil.jinja";
        ends(&b, command, 1, &["error: chat.jsonl:1: ", part]);
    }
    b.file("broken.jinja", "{% for");
    let asked = "demo --data rows.jsonl --chat-template broken.jinja -o out";
    ends(&b, asked, 78, &["--chat-template broken.jinja: chat template: "]);
    assert!(!b.path("out").exists());
}

#[test]
fn tokenizers_are_bounded() {
    let b = Bench::new();
    b.file("rows.jsonl", &format!("{{\"text\": \"{}!\"}}\n", "a".repeat(40)));
    b.model_with("pattern", "tokenizer.json", |t| {
        let split =
            json!({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": false});
        t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, t["pre_tokenizer"]]});
    });
    b.model_with("growing", "tokenizer.json", |t| {
        let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1000)});
        t["normalizer"] = json!({"type": "Sequence", "normalizers": vec![replace; 4]});
    });
    let fails = ["error: rows.jsonl:1: tokenizer: tokenizer.json fails on this text", "the model's page"];
    ends(&b, "./pattern --data rows.jsonl -o out", 1, &fails);
    ends(&b, "./growing --data rows.jsonl -o out", 1, &["error: rows.jsonl:1: ", "MB of memory"]);
    ends(&b, "generate ./growing --prompt aaaa", 1, &["error: the prompt: ", "MB of memory"]);
}
