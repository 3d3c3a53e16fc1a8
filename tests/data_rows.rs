//! Ids and masks of every form of row against transformers: tests/golden/rows/make.py.

#![allow(clippy::unwrap_used)] // what tests call is test code

use finetune::data::{Options, Task, Tokenizer, encode, form};
use serde_json::Value;

fn tokenizer(name: &str, config: &Value, template: Option<&str>) -> Tokenizer {
    let json = std::fs::read_to_string(format!("tests/golden/rows/{name}.json")).unwrap();
    Tokenizer::new(&json, Some(&config[name]), None, template).unwrap()
}

fn check(case: &Value, config: &Value) -> Result<(), String> {
    let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap(), config, case["template"].as_str());
    let task = if case["row"]["label"].is_null() { Task::Sft } else { Task::Classify };
    let form = form::of(&case["row"], &Options { task, ..Options::default() })?;
    let (ours, _) = encode::encode(&form, &tokenizer).map_err(|e| e.to_string())?;
    let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
    let mask: Vec<bool> = case["mask"].as_array().unwrap().iter().map(|m| m == 1).collect();
    let show = |ids: &[u32], mask: &[bool]| -> String {
        let word = |(i, m): (&u32, &bool)| {
            let text = tokenizer.decode(&[*i], finetune::data::tokenizer::Skip::Nothing).unwrap();
            if *m { format!("[{text}]") } else { text }
        };
        ids.iter().zip(mask).map(word).collect()
    };
    match ours.ids == ids && ours.mask == mask {
        true => Ok(()),
        false => Err(format!("ours     {:?}\nexpected {:?}", show(&ours.ids, &ours.mask), show(&ids, &mask))),
    }
}

#[test]
fn ids_and_masks_equal_transformers() {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string("tests/golden/rows/cases.json").unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 100);
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|c| {
            Some(format!("{} {}\n{}\n", c["row"], c["template"], check(c, &golden["config"]).err()?))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} rows differ\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
