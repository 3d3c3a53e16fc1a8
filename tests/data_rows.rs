//! Ids and masks of every form of row against transformers, and the values of --learn against other trainers:
//! tests/golden/rows/make.py and make_learn.py.

use finetune::data::template::with_defaults;
use finetune::data::{Learn, Options, Task, Tokenizer, chat, encode, form};
use proptest::prelude::*;
use serde_json::{Value, json};

fn tokenizer(name: &str, config: &Value, template: Option<&str>) -> Tokenizer {
    let json = std::fs::read_to_string(format!("tests/golden/rows/{name}.json")).unwrap();
    Tokenizer::new(&json, Some(&config[name]), None, template).unwrap()
}

fn check(case: &Value, config: &Value) -> Result<(), String> {
    let args: Vec<(String, Value)> =
        case["row"]["chat_template_kwargs"].as_object().cloned().unwrap_or_default().into_iter().collect();
    let template = case["template"].as_str().map(|text| with_defaults(text, &args));
    let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap(), config, template.as_deref());
    let task = if case["row"]["label"].is_null() { Task::Sft } else { Task::Classify };
    let form = form::of(&case["row"], &Options { task, ..Options::default() })?;
    let learn = case["learn"].as_str().unwrap_or("answers");
    let (_, learn) = Learn::ALL.into_iter().find(|(name, _)| *name == learn).unwrap();
    let (ours, _) = encode::encode(&form, &tokenizer, (learn, usize::MAX)).map_err(|e| e.to_string())?;
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

fn check_all(file: &str, least: usize) {
    let text = std::fs::read_to_string(format!("tests/golden/rows/{file}")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= least);
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|c| {
            Some(format!(
                "{} {} {} {}\n{}\n",
                c["by"],
                c["learn"],
                c["row"],
                c["template"],
                check(c, &golden["config"]).err()?
            ))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} rows differ\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn ids_and_masks_equal_transformers() {
    check_all("cases.json", 101);
}

#[test]
fn what_is_learnt_equals_other_trainers() {
    check_all("learn.json", 66);
}

/// Marks that contradict, marks of other types, and generation blocks that belong to no single message.
#[test]
fn invalid_marks_are_refused() {
    let row = |mark: Value| json!({"messages": [{"role": "user", "content": "q"}, mark]});
    for (mark, part) in [
        (
            json!({"role": "assistant", "content": "a", "train": 1}),
            "message 2: its `train` must be true or false",
        ),
        (
            json!({"role": "assistant", "content": "a", "weight": 0.5}),
            "message 2: its `weight` must be 0 or 1",
        ),
        (json!({"role": "assistant", "content": "a", "weight": 0, "train": true}), "contradicts another"),
    ] {
        let error = form::of(&row(mark), &Options::default()).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let two = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";
    let bytes = tokenizer("bytes", &json!({"bytes": {"eos_token": "<|im_end|>"}}), Some(two));
    let form = form::of(&row(json!({"role": "assistant", "content": "a"})), &Options::default()).unwrap();
    let error = encode::encode(&form, &bytes, (Learn::Last, 9)).unwrap_err().to_string();
    assert!(error.contains("2 {% generation %} blocks for 1 assistant messages"), "{error}");
}

/// Marks of ShareGPT turns reach the message; null is no mark.
#[test]
fn marks_of_sharegpt_turns_count() {
    let turns = json!({"conversations": [
        {"from": "human", "value": "q", "weight": null}, {"from": "gpt", "value": "a", "weight": 0},
        {"from": "human", "value": "q"}, {"from": "gpt", "value": "b", "weight": 1.0},
    ]});
    let form = form::of(&turns, &Options::default()).unwrap();
    let (encoded, _) = encode::encode(&form, plain(), (Learn::Answers, usize::MAX)).unwrap();
    let learnt: Vec<u32> =
        encoded.ids.iter().zip(&encoded.mask).filter(|(_, m)| **m).map(|(id, _)| *id).collect();
    assert_eq!(plain().decode(&learnt, finetune::data::tokenizer::Skip::Nothing).unwrap(), "b<|im_end|>");
}

fn word() -> impl Strategy<Value = Value> {
    let text = prop_oneof!["\\PC{0,12}", "[a-z <|>\n]{0,20}", Just("<|im_end|>".to_owned())];
    prop_oneof![
        text.prop_map(Value::from),
        Just(Value::Null),
        any::<i64>().prop_map(Value::from),
        Just(json!([]))
    ]
}

/// Rows with the field names of all forms, and arbitrary values.
fn any_row() -> impl Strategy<Value = Value> {
    let names = "text|prompt|completion|instruction|input|output|system|history|label|tools|chosen|rejected";
    let message = proptest::collection::hash_map("role|content|tool_calls|from|value", word(), 0..4);
    let talk = proptest::collection::vec(message.prop_map(|m| json!(m)), 0..4).prop_map(Value::from);
    let fields = proptest::collection::hash_map(names, word(), 0..6);
    let talks = proptest::collection::hash_map("messages|conversations|prompt|completion", talk, 0..2);
    (fields, talks).prop_map(|(a, b)| a.into_iter().chain(b).collect::<serde_json::Map<_, _>>().into())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_row_is_tokens_or_an_error(row in any_row(), classify in any::<bool>()) {
        let tokenizer = plain();
        let task = if classify { Task::Classify } else { Task::Sft };
        if let Ok(form) = form::of(&row, &Options { task, ..Options::default() })
            && let Ok((encoded, label)) = encode::encode(&form, tokenizer, (Learn::Answers, usize::MAX))
        {
            prop_assert_eq!(encoded.ids.len(), encoded.mask.len());
            prop_assert_eq!(label.is_some(), classify);
            prop_assert!(encoded.ids.iter().all(|&i| (i as usize) < tokenizer.vocab_size()));
        }
    }

    /// For any text, the spans hold exactly the assistant's text and the end of the turn.
    #[test]
    fn spans_cover_the_assistant_turns(turns in proptest::collection::vec(("\\PC{0,20}", "(?s).{0,20}"), 1..4)) {
        let mut messages = Vec::new();
        for (user, assistant) in &turns {
            messages.push(json!({"role": "user", "content": user}));
            messages.push(json!({"role": "assistant", "content": assistant}));
        }
        let chat = form::Chat { messages: Value::from(messages), tools: None, context: 0 };
        let whole = chat::render(&chat, plain()).unwrap();
        let spans = chat::supervised(&chat, plain(), &whole, (Learn::Answers, usize::MAX)).unwrap();
        let ours: Vec<&str> = spans.iter().map(|s| &whole.text[s.clone()]).collect();
        let expected: Vec<String> = turns.iter().map(|(_, a)| format!("{a}<|im_end|>")).collect();
        prop_assert_eq!(ours, expected);
    }

    /// A marked turn of a user is learnt from its text on, although the header may contain the text too.
    #[test]
    fn marked_turns_begin_at_their_content(text in r"u|user|[user<|\n ]{0,6}|\PC{0,8}", parts in any::<bool>()) {
        let content = if parts { json!([{"type": "text", "text": text}]) } else { json!(text) };
        let user = json!({"role": "user", "content": content, "train": true});
        let chat = form::Chat { messages: json!([user, {"role": "assistant", "content": "a"}]), tools: None, context: 0 };
        let tokenizer = if parts { with_parts() } else { plain() };
        let whole = chat::render(&chat, tokenizer).unwrap();
        let spans = chat::supervised(&chat, tokenizer, &whole, (Learn::Marked, usize::MAX)).unwrap();
        let ours: Vec<&str> = spans.iter().map(|s| &whole.text[s.clone()]).collect();
        prop_assert_eq!(ours, [format!("{}<|im_end|>", text.trim_start())]);
    }
}

/// A template without generation blocks, so that turns are located by rendering prefixes.
fn plain() -> &'static Tokenizer {
    static PLAIN: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    PLAIN.get_or_init(|| {
        let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
        tokenizer("bytes", &json!({"bytes": {"eos_token": "<|im_end|>"}}), Some(template))
    })
}

/// A template of messages whose content is a list of parts.
fn with_parts() -> &'static Tokenizer {
    static PARTS: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    PARTS.get_or_init(|| {
        let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}\
                        {% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}";
        tokenizer("bytes", &json!({"bytes": {"eos_token": "<|im_end|>"}}), Some(template))
    })
}

/// Templates whose turns cannot be separated are refused, and the message names the remedy.
#[test]
fn templates_that_hide_turns_are_refused() {
    let talk = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    for (template, part) in [
        (
            "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
            "does not begin",
        ),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "does not begin"),
        ("{{ messages[1].content.nothing() }}", "chat template"),
        ("{% for m in messages %}", "chat template"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "no user"),
    ] {
        let tokenizer = tokenizer("bytes", &json!({"bytes": {"eos_token": "<|im_end|>"}}), Some(template));
        let form = form::of(&talk, &Options::default()).unwrap();
        let error = encode::encode(&form, &tokenizer, (Learn::Answers, usize::MAX)).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{template}: {error}");
    }
    let bare = tokenizer("bytes", &json!({"bytes": {"eos_token": "<|im_end|>"}}), None);
    let error = encode::encode(&form::of(&talk, &Options::default()).unwrap(), &bare, (Learn::Answers, 9))
        .unwrap_err()
        .to_string();
    assert!(error.contains("--chat-template FILE or chatml"), "{error}");
}

/// A think block without content: in the turn, begun by the prompt, and wholly in the prompt.
#[test]
fn an_empty_thought_is_noticed_where_it_is_learnt() {
    let talk = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    let form = form::of(&talk, &Options::default()).unwrap();
    let config = json!({"bytes": {"eos_token": "<|im_end|>"}});
    for (prompt, turn, empty) in [
        ("", "<think>\n\n</think>\n\n", true),
        ("<think>\n", "\n</think>\n\n", true),
        ("<think>\n\n</think>\n\n", "", false),
        ("<think>\n", "so\n</think>\n\n", false),
    ] {
        let template = format!(
            "{{% for m in messages %}}{{% if m.role == 'assistant' %}}A:{prompt}{turn}{{{{ m.content }}}}<|im_end|>\
             {{% else %}}Q:{{{{ m.content }}}}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}A:{prompt}{{% endif %}}"
        );
        let bytes = tokenizer("bytes", &config, Some(&template));
        let (encoded, _) = encode::encode(&form, &bytes, (Learn::Answers, usize::MAX)).unwrap();
        assert_eq!(encoded.thought.empty, empty, "{prompt:?} {turn:?}");
    }
}
