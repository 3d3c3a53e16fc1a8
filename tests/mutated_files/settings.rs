//! Files that a user writes for a run: YAML configurations and the token file.

use crate::mutate::{self, Dice};
use crate::weights::file;
use crate::{Files, Format};
use finetune::config::groups::Options;
use finetune::config::refusal::Refusal;
use finetune::config::{Settings, table, yaml};
use finetune::net::Token;
use finetune::net::keyring::Keyring;
use std::path::Path;

pub const FORMATS: &[Format] = &[
    Format { name: "yaml", share: 4, whole: configuration, damage: in_the_yaml, read: read_yaml },
    Format { name: "token", share: 2, whole: secret, damage: in_the_token, read: read_token },
];

const RUN_YAML: &str = "# a run
run:
  version: 0.1.0
  model_hash: \"00ff\"
model: demo
data:
  data: [a.jsonl, 'b.jsonl']
  eval_split: 0.1
  max_seq_len: 512
  packing: true
lora:
  rank: 8
  alpha: 16.5
  target_modules:
    - q_proj
    - v_proj
optim:
  learning_rate: 2.0e-4
  epochs: 3
  batch_size: 8
  warmup_ratio: 0.03
  seed: 42
devices:
  threads: 2
cluster:
  expect_workers: 2
  join_timeout: 10m
output:
  output: \"runs/a\"
  save_steps: 10
  sample_prompt: |-
    Two
    lines
";

fn configuration() -> Files {
    vec![file("run.yaml", RUN_YAML)]
}

const YAML: [&str; 20] = [
    "&a",
    "*a",
    "<<: *a",
    "!!python/object:os.system x",
    "!!binary aGk=",
    "? x",
    "---",
    "...",
    "|",
    ">-",
    "[[[[[[[[[[",
    "{a: b",
    "%YAML 9.9",
    "rank: .nan",
    "rank: .inf",
    "rank: 0x10",
    "rank: 1_000",
    "seed: -1",
    "rank: 99999999999999999999",
    "\u{85}",
];

fn in_the_yaml(dice: &mut Dice, _: &Files) -> Files {
    let mut text = String::from(RUN_YAML);
    match dice.below(8) {
        0 => {
            let mut lines: Vec<&str> = RUN_YAML.lines().collect();
            lines.insert(dice.below(lines.len()), dice.word(&YAML));
            text = lines.join("\n");
        }
        1 => {
            // Each list is ten times as large as the one before.
            let deep = 2 + dice.below(9);
            text = (1..=deep).fold("a0: &a0 [x, x]\n".into(), |text, i| {
                format!("{text}a{i}: &a{i} [{}]\n", vec![format!("*a{}", i - 1); 10].join(", "))
            });
        }
        2 => text = format!("rank: {}", ["[", "{a: ", "- ", "? "][dice.below(4)].repeat(1 << dice.below(14))),
        3 | 4 => {
            // Another value for a known key.
            let keys: Vec<&str> = RUN_YAML.lines().filter(|line| line.contains(": ")).collect();
            let line = dice.word(&keys);
            let key = line.split(": ").next().unwrap();
            let value = match dice.below(3) {
                0 => dice.number().to_string(),
                1 => mutate::text(dice, line.split(": ").nth(1).unwrap()),
                _ => dice
                    .word(&[
                        "-1",
                        "0",
                        "1e999",
                        ".nan",
                        "\"\"",
                        "[]",
                        "{}",
                        "null",
                        "~",
                        "true",
                        "\"a\\nb\\e[2J\"",
                        "1e-9",
                    ])
                    .into(),
            };
            text = text.replace(line, &format!("{key}: {value}"));
        }
        _ => text = mutate::lines(dice, RUN_YAML),
    }
    let mut bytes = text.into_bytes();
    if dice.one_in(8) {
        mutate::bytes(dice, &mut bytes);
    }
    vec![file("run.yaml", bytes)]
}

fn read_yaml(folder: &Path) -> Result<(), Refusal> {
    let typed = yaml::read(&folder.join("run.yaml"))?;
    let all: Vec<&'static table::Opt> = table::TABLE.iter().collect();
    let settings = Settings::resolve(&all, vec![typed])?;
    std::hint::black_box(Options::of(&settings)?);
    Ok(())
}

const HEX: &str = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210";

fn secret() -> Files {
    vec![file("token", HEX)]
}

fn in_the_token(dice: &mut Dice, _: &Files) -> Files {
    let mut bytes = match dice.one_in(2) {
        true => HEX.to_string(),
        false => Token::parse(HEX).unwrap().text(),
    };
    if dice.one_in(4) {
        bytes = format!("\u{feff}  {}\r\n", bytes.to_uppercase());
    }
    let mut bytes = match dice.one_in(2) {
        true => mutate::text(dice, &bytes).into_bytes(),
        false => bytes.into_bytes(),
    };
    if dice.one_in(3) {
        mutate::bytes(dice, &mut bytes);
    }
    vec![file("token", bytes)]
}

fn read_token(folder: &Path) -> Result<(), Refusal> {
    let path = folder.join("token");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(Refusal::failure)?;
    }
    let found = Keyring::of_user(Some(&path)).find().map_err(Refusal::failure)?;
    let text = std::fs::read_to_string(&path).map_err(Refusal::failure)?;
    let token = Token::parse(&text).map_err(Refusal::failure)?;
    assert_eq!(found.map(|found| found.token.fingerprint()), Some(token.fingerprint()));
    assert_eq!(Token::parse(&token.text()).map(|again| again.fingerprint()), Ok(token.fingerprint()));
    Ok(())
}
