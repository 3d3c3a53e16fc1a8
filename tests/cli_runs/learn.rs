//! What is trained on: --learn, marked messages, --long-rows, --template-args, and what later commands take from a run.

use crate::cli_fixture::{Bench, stderr};
use serde_json::{Value, json};

fn talk(i: usize, mark: Value) -> String {
    let turn = |role: &str, text: String| json!({"role": role, "content": text});
    let mut last = turn("assistant", format!("git branch -d {i}"));
    last["train"] = mark;
    let turns = [
        turn("user", format!("List branch {i}")),
        turn("assistant", format!("git branch {i}")),
        turn("user", format!("Delete branch {i}")),
        last,
    ];
    json!({ "messages": turns }).to_string() + "\n"
}

fn bench(mark: Value) -> Bench {
    let b = Bench::new();
    b.file("talk.jsonl", &(0..8).map(|i| talk(i, mark.clone())).collect::<String>());
    b
}

/// The last line that begins with this word.
fn line(text: &str, word: &str) -> String {
    text.lines().rfind(|line| line.starts_with(word)).unwrap_or_default().to_string()
}

#[test]
fn inspect_shows_what_each_choice_learns() {
    let b = bench(Value::Null);
    let shown = |b: &Bench, options: &str| {
        let said = b.ok(&format!("inspect talk.jsonl --model demo --rows 1 {options}"));
        said.split_once("--- row 0").unwrap().1.matches('⟦').count()
    };
    assert_eq!((shown(&b, ""), shown(&b, "--learn last"), shown(&b, "--learn all")), (2, 1, 1));
    let all = b.ok("inspect talk.jsonl --model demo --rows 1 --learn all");
    assert!(all.contains("⟦<|im_start|>user\nList branch 0"), "{all}");
    let out = b.run("inspect talk.jsonl --model demo --learn marked");
    assert!(
        stderr(&out).contains("no message is marked with `train: true` (--learn marked)"),
        "{}",
        stderr(&out)
    );
    let marked = bench(json!(true));
    assert_eq!(shown(&marked, "--learn marked"), 1);
    let unmarked = bench(json!(false));
    let said = unmarked.ok("inspect talk.jsonl --model demo --rows 1");
    assert!(said.contains("⟦git branch 0<|im_end|>⟧") && !said.contains("⟦git branch -d"), "{said}");
}

/// The choice decides the bytes, is said, is recorded, and holds for eval and for a resumed run.
#[test]
fn learn_decides_the_run_and_its_evaluation() {
    let b = bench(Value::Null);
    let run = "demo --data talk.jsonl --eval-data talk.jsonl --max-steps 2 --save-steps 1";
    let out = b.run(&format!("{run} --mask_history -o last"));
    let said = stderr(&out);
    assert!(said.contains("note: learn last = mask_history true (flag)"), "{said}");
    assert!(line(&said, "rows ").contains("; --learn last"), "{said}");
    b.ok(&format!("{run} -o answers -q"));
    let bytes = |name: &str| b.read(&format!("{name}/adapter_model.safetensors"));
    assert_ne!(bytes("last"), bytes("answers"));
    let loss = |options: &str| line(&b.ok(&format!("eval {options} --data talk.jsonl")), "loss");
    let last = loss("--adapter last");
    let of_run = line(&said, "eval after step 2: loss");
    assert!(of_run.contains(last.split_whitespace().last().unwrap()), "{of_run} {last}");
    assert_ne!(last, loss("--adapter last --learn answers"));
    std::fs::remove_dir_all(b.path("last/checkpoint-2")).unwrap();
    let out = b.run("--resume last --learn answers");
    assert!(!out.status.success() && stderr(&out).contains("learn"), "{}", stderr(&out));
    b.ok("--resume last -q");
    // Workers get tokens and masks from the coordinator's plan.
    b.ok(&format!("{run} --learn last --gpus cpu,cpu --threads 2 -o two -q"));
    b.same_adapter("last", "two");
}

#[test]
fn long_rows_are_counted_in_head_lines_and_plan() {
    let b = bench(Value::Null);
    let run = "demo --data talk.jsonl --max-seq-len 20 --max-steps 1";
    for (long, part) in [("cut", "; 8 cut at --max-seq-len"), ("split", "; 8 split into ")] {
        let said = stderr(&b.run(&format!("{run} --long-rows {long} -o {long}")));
        assert!(line(&said, "rows ").contains(part), "{said}");
        let plan = b.ok(&format!("plan {run} --long-rows {long} --gpus cpu -o plan"));
        assert!(line(&plan, "rows ").contains(part), "{plan}");
    }
    let out = b.run(&format!("{run} --long-rows drop -o drop"));
    assert!(
        stderr(&out).contains("talk.jsonl:1: it has more than 20 tokens (--long-rows drop)"),
        "{}",
        stderr(&out)
    );
    let out = b.run(&format!("{run} --long-rows refuse -o refuse"));
    assert!(stderr(&out).contains("talk.jsonl:1: it has more than 20 tokens"), "{}", stderr(&out));
    assert!(!b.path("refuse").exists());
}

/// The adapter's template has the values, so that each later command renders as the training did.
#[test]
fn template_args_stay_with_the_adapter() {
    let b = bench(Value::Null);
    let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
                    {% if style is defined %}{{ '(' + style + ')\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}\
                    {{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
                    {% if style is defined %}{{ '(' + style + ')\n' }}{% endif %}{% endif %}";
    b.file("t.jinja", template);
    let inspect = "inspect talk.jsonl --model demo --rows 1 --chat-template t.jinja";
    let empty = "warning: an empty think block is trained on in 8 of 8 rows (100 %)";
    assert!(b.ok(inspect).contains(empty), "{}", b.ok(inspect));
    let said = b.ok(&format!("{inspect} --template-args style=brief"));
    assert!(said.contains("(brief)\n⟦git branch 0<|im_end|>⟧") && !said.contains(empty), "{said}");
    let run = "demo --data talk.jsonl --eval-data talk.jsonl --chat-template t.jinja --max-steps 1";
    let said = stderr(&b.run(&format!("{run} -o out --template-args style=brief")));
    assert!(!said.contains("think block"), "{said}");
    let written = String::from_utf8(b.read("out/chat_template.jinja")).unwrap();
    assert!(written.starts_with("{%- if style is not defined %}{%- set style = \"brief\" %}"), "{written}");
    assert!(written.ends_with(template), "{written}");
    let loss =
        |options: &str| line(&b.ok(&format!("eval --adapter out --data talk.jsonl {options}")), "loss");
    let of_run = line(&said, "eval after step 1: loss");
    assert!(of_run.contains(loss("").split_whitespace().last().unwrap()), "{of_run} {}", loss(""));
    assert_ne!(loss(""), loss("--template-args style=other"));
    let answer = |options: &str| {
        b.ok(&format!("generate --adapter out --prompt 'List branch 3' --max-new-tokens 12 {options}"))
    };
    assert_eq!(answer(""), answer("--template-args style=brief"));
    assert_ne!(answer(""), answer("--template-args '{\"style\": \"say a poem about\"}'"));
    let out = b.run(&format!("{run} -o typo --template-args stile=brief"));
    assert!(stderr(&out).contains("warning: --template-args stile: the chat template has no such variable"));
}
