//! Which rows a run trains on.

use super::cli_fixture::{Bench, rows};

const RUN: &str = "demo --max-steps 3 --batch-size 4 --rank 2 -q";

#[test]
fn max_rows_trains_as_a_shorter_file_does() {
    let b = Bench::new();
    b.file("six.jsonl", &rows(6));
    b.file("one.jsonl", &rows(1));
    b.ok(&format!("{RUN} --data six.jsonl --eval-split 2 -o short"));
    b.ok(&format!("{RUN} --data rows.jsonl --max-rows 6 --eval-split 2 -o long"));
    b.same_adapter("short", "long");
    let eval = |data: &str| b.ok(&format!("eval demo --data {data} --json"));
    assert_eq!(eval("eval.jsonl --max-rows 1"), eval("one.jsonl"));
    assert_ne!(eval("eval.jsonl"), eval("one.jsonl"));
    let inspect = |args: &str| b.ok(&format!("inspect rows.jsonl --json --max-rows 5 {args}"));
    assert!(inspect("").contains("\"rows\":5,"), "{}", inspect(""));
    assert!(inspect("--model demo").contains("\"rows\":5,"), "{}", inspect("--model demo"));
}

#[test]
fn a_mixture_has_the_same_bytes_after_a_resume_and_on_a_line() {
    let b = Bench::new();
    b.file("few.jsonl", &rows(5));
    let run = "demo --data rows.jsonl=0.25 --data few.jsonl=0.75 --batch-size 4 --rank 2 --save-steps 1 -q";
    b.ok(&format!("{run} --max-steps 11 -o whole"));
    b.ok("--config whole/run.yaml -o again -q");
    b.same_adapter("whole", "again");
    // 29 rows are 8 steps an epoch: step 10 is in the middle of the second one.
    std::fs::remove_dir_all(b.path("again/checkpoint-11")).unwrap();
    std::fs::remove_file(b.path("again/adapter_model.safetensors")).unwrap();
    b.ok(&format!("{run} --max-steps 11 -o again --resume"));
    b.same_adapter("whole", "again");
    b.ok(&format!("{run} --max-steps 11 --gpus cpu+cpu -o two"));
    b.same_adapter("whole", "two");
    b.ok(&format!("{} --max-steps 11 -o other", run.replace("0.25", "0.5")));
    assert_ne!(b.read("whole/adapter_model.safetensors"), b.read("other/adapter_model.safetensors"));
    let refused = |args: &str, code: i32, part: &str| {
        let out = b.run(args);
        let said = super::cli_fixture::stderr(&out);
        assert!(out.status.code() == Some(code) && said.contains(part), "{args}: {said}");
    };
    let resumed = format!("{} --max-steps 11 -o again --resume", run.replace("0.25", "0.5"));
    refused(&resumed, 78, "mixture");
    refused("demo --data rows.jsonl=0.5 --data few.jsonl -o no", 78, "few.jsonl has no weight");
    let never = "demo --data rows.jsonl=1 --data few.jsonl=0.001 -o no";
    refused(never, 78, "its share of an epoch is less than one row");
}
