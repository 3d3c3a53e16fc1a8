//! Chat templates against the text that transformers renders: tests/golden/templates/make.py. FINETUNE_TEMPLATE_CASES
//! names another file of cases of the same shape.

use finetune::data::template::{ChatTemplate, Ending, SpecialTokens};
use serde_json::Value;

fn specials() -> SpecialTokens {
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    SpecialTokens(vec![pair("bos_token", "<s>"), pair("eos_token", "</s>")])
}

/// The difference between our rendering of one case and the expected one, if any.
fn check(golden: &Value, case: &Value) -> Option<String> {
    let source = golden["templates"][case["template"].as_str()?].as_str()?;
    let talk = &golden["conversations"][case["conversation"].as_str()?];
    let template = ChatTemplate::at(golden["now"].as_i64()?, source, None, specials());
    let ending = if case["prompt"] == true { Ending::GenerationPrompt } else { Ending::Turn };
    let ours = template.render_traced(&talk["messages"], talk.get("tools"), ending);
    let expected = case["text"].as_str();
    match (ours, expected) {
        (Err(_), None) => None,
        (Ok(r), Some(e)) if r.text == e => {
            let blocks = case["blocks"].as_array()?;
            // Python counts characters, this code counts bytes
            let byte = |v: &Value| {
                let n = v.as_u64().unwrap_or(0) as usize;
                e.char_indices().nth(n).map_or(e.len(), |(at, _)| at)
            };
            let blocks: Vec<_> = blocks.iter().map(|b| byte(&b[0])..byte(&b[1])).collect();
            (r.generation.as_ref() != Some(&blocks))
                .then(|| format!("blocks {:?}, not {blocks:?}", r.generation))
        }
        (Ok(r), _) => Some(format!("ours     {:?}\nexpected {expected:?}", r.text)),
        (Err(e), Some(_)) => Some(format!("ours fails: {e}\nexpected {expected:?}")),
    }
}

fn run(path: &str) {
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 300);
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|c| {
            Some(format!(
                "{} / {} / {}\n{}\n",
                c["template"],
                c["conversation"],
                c["prompt"],
                check(&golden, c)?
            ))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} cases differ\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn templates_render_the_bytes_of_transformers() {
    run("tests/golden/templates/cases.json");
}

#[test]
fn further_templates_render_the_same_bytes() {
    match std::env::var("FINETUNE_TEMPLATE_CASES") {
        Ok(path) => run(&path),
        Err(_) => eprintln!("skipped: FINETUNE_TEMPLATE_CASES names no further cases"),
    }
}
