//! Misspelt environment variables.

use crate::cli_fixture::{Bench, stderr};

#[test]
fn a_misspelt_variable_is_refused() {
    let b = Bench::new();
    for (args, code) in [("demo --data rows.jsonl -o out", 78), ("devices", 78), ("help", 0)] {
        let out = b.command(args).env("FINETUNE_RNAK", "3").output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{args}: {}", stderr(&out));
        let said = stderr(&out).contains("FINETUNE_RNAK: did you mean FINETUNE_RANK?");
        assert_eq!(said, code == 78, "{args}: {}", stderr(&out));
    }
    assert!(!b.path("out").exists());
}
