//! Chat templates in the language of Ollama's Modelfiles, for the families whose turns we know. A family is
//! recognised by what a model's own template makes of five conversations, not by its text; and what our Go
//! templates make of them was made by Go itself (`tests/golden/ollama`).

use crate::data::template::{ChatTemplate, Ending};
use serde_json::{Value, json};

/// (role, content)
pub type Turn = (&'static str, &'static str);

/// The conversations, each before the assistant's next turn.
pub const CONVERSATIONS: [&[Turn]; 5] = [
    &[("user", "Say hi.")],
    &[("system", "Be brief."), ("user", "What is 2 + 2?")],
    &[("user", "One?"), ("assistant", "Two."), ("user", "Three?")],
    &[
        ("system", "You speak C."),
        ("user", "Loop!"),
        ("assistant", "for (;;) {}"),
        ("user", "And \"quotes\"?"),
    ],
    &[
        ("user", "Lines:\n\n- a {{ b }}\n- <c> & d"),
        ("assistant", "\u{e9}\u{1f680}"),
        ("user", "x"),
        ("assistant", "y"),
        ("user", "z"),
    ],
];

/// A way of writing turns.
pub struct Family {
    /// For a person.
    pub name: &'static str,
    /// The Modelfile's TEMPLATE.
    pub template: &'static str,
    /// What it makes of a conversation.
    pub text: fn(&[(String, String)]) -> String,
}

/// Every family with a Go template.
pub const FAMILIES: [Family; 4] = [
    Family { name: "ChatML", template: CHATML, text: chatml },
    Family { name: "Llama 3", template: LLAMA3, text: llama3 },
    Family { name: "Mistral", template: MISTRAL, text: |turns| mistral(turns, "[INST] ", "[/INST]") },
    Family {
        name: "Mistral 0.1",
        template: MISTRAL_SPACED,
        text: |turns| mistral(turns, "[INST] ", " [/INST]"),
    },
];

const CHATML: &str = "\
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
";

const LLAMA3: &str = "\
{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>
{{- end }}<|start_header_id|>assistant<|end_header_id|>

";

/// Its system turn stands before the last question.
const MISTRAL: &str = "\
{{- range $index, $_ := .Messages }}
{{- if eq .Role \"user\" }}[INST] {{ if and $.System (eq (len (slice $.Messages $index)) 1) }}{{ $.System }}

{{ end }}{{ .Content }}[/INST]
{{- else if eq .Role \"assistant\" }} {{ .Content }}</s>
{{- end }}
{{- end }}";

/// Older ones put a space before the end of a question.
const MISTRAL_SPACED: &str = "\
{{- range $index, $_ := .Messages }}
{{- if eq .Role \"user\" }}[INST] {{ if and $.System (eq (len (slice $.Messages $index)) 1) }}{{ $.System }}

{{ end }}{{ .Content }} [/INST]
{{- else if eq .Role \"assistant\" }} {{ .Content }}</s>
{{- end }}
{{- end }}";

fn chatml(turns: &[(String, String)]) -> String {
    let turn = |(role, text): &(String, String)| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    turns.iter().map(turn).collect::<String>() + "<|im_start|>assistant\n"
}

fn llama3(turns: &[(String, String)]) -> String {
    let head = |role: &str| format!("<|start_header_id|>{role}<|end_header_id|>\n\n");
    let turn = |(role, text): &(String, String)| format!("{}{text}<|eot_id|>", head(role));
    turns.iter().map(turn).collect::<String>() + &head("assistant")
}

fn mistral(turns: &[(String, String)], open: &str, close: &str) -> String {
    let system = turns.iter().find(|t| t.0 == "system").map(|t| t.1.as_str());
    let mut out = String::new();
    for (at, (role, text)) in turns.iter().enumerate() {
        match (role.as_str(), system.filter(|_| at + 1 == turns.len())) {
            ("user", Some(system)) => out += &format!("{open}{system}\n\n{text}{close}"),
            ("user", None) => out += &format!("{open}{text}{close}"),
            ("assistant", _) => out += &format!(" {text}</s>"),
            _ => {}
        }
    }
    out
}

/// What stands in for a model's own chat template.
pub struct Match {
    /// The family's template.
    pub family: &'static Family,
    /// The system turn that the model's template adds where there is none.
    pub system: Option<String>,
}

/// The family of a model's chat template, None where none gives the same texts. A template that refuses
/// system turns is judged by the others.
pub fn family_of(template: &ChatTemplate, bos: Option<&str>) -> Option<Match> {
    let rendered = |turns: &[Turn]| {
        let messages: Vec<Value> =
            turns.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
        let text = template.render(&json!(messages), None, Ending::GenerationPrompt).ok()?;
        // Ollama puts the first token there itself.
        Some(bos.and_then(|bos| text.strip_prefix(bos)).map_or(text.clone(), str::to_owned))
    };
    let texts: Vec<_> = CONVERSATIONS.iter().map(|turns| rendered(turns)).collect();
    FAMILIES.iter().find_map(|family| {
        let system = added_system(family, texts[0].as_deref()?)?;
        let same = CONVERSATIONS.iter().zip(&texts).all(|(turns, text)| {
            let has_system = turns[0].0 == "system";
            match text {
                Some(text) => *text == (family.text)(&with_system(turns, system.as_deref())),
                None => has_system,
            }
        });
        same.then_some(Match { family, system })
    })
}

/// A conversation, with a system turn before it where it has none and there is one to add.
pub fn with_system(turns: &[Turn], system: Option<&str>) -> Vec<(String, String)> {
    let own = |(role, text): &Turn| ((*role).to_owned(), (*text).to_owned());
    let added = system.filter(|_| turns[0].0 != "system").map(|s| ("system".to_owned(), s.to_owned()));
    added.into_iter().chain(turns.iter().map(own)).collect()
}

/// The system turn that a template put before the first conversation; None where that is not this family.
fn added_system(family: &Family, text: &str) -> Option<Option<String>> {
    let plain = (family.text)(&with_system(CONVERSATIONS[0], None));
    if text == plain {
        return Some(None);
    }
    let marked = (family.text)(&with_system(CONVERSATIONS[0], Some("\u{1}")));
    let (before, after) = marked.split_once('\u{1}')?;
    let system = text.strip_prefix(before)?.strip_suffix(after)?;
    Some(Some(system.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::template::SpecialTokens;

    /// Texts by Go, where `go.rs` says the same: `tests/golden/ollama/make.sh`.
    #[test]
    fn golden_texts_of_go_templates_match() {
        let golden: Value =
            serde_json::from_str(include_str!("../../../tests/golden/ollama/go.json")).unwrap();
        for family in &FAMILIES {
            let case = golden.as_array().unwrap().iter().find(|c| c["name"] == family.name).unwrap();
            assert_eq!(case["template"], family.template, "{}", family.name);
            for (turns, text) in CONVERSATIONS.iter().zip(case["texts"].as_array().unwrap()) {
                assert_eq!(
                    (family.text)(&with_system(turns, None)),
                    text.as_str().unwrap(),
                    "{}",
                    family.name
                );
            }
        }
    }

    #[test]
    fn family_is_recognised_by_its_template_output() {
        let check = |template: &str, name: Option<&str>, system: Option<&str>| {
            let specials = SpecialTokens(vec![("bos_token".into(), "<s>".into())]);
            let found = family_of(&ChatTemplate::at(0, template, None, specials), Some("<s>"));
            assert_eq!(found.as_ref().map(|m| m.family.name), name, "{template}");
            assert_eq!(found.and_then(|m| m.system).as_deref(), system, "{template}");
        };
        let turn = "{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}";
        let chatml = |first: &str, turn: &str| {
            format!(
                "{{% for m in messages %}}{first}{turn}{{% endfor %}}{{% if add_generation_prompt %}}\
                 {{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
            )
        };
        check(&chatml("", turn), Some("ChatML"), None);
        let default = "{% if loop.first and messages[0]['role'] != 'system' %}\
                       {{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}";
        check(&chatml(default, turn), Some("ChatML"), Some("Be kind."));
        check(&chatml("", &turn.replace("'<|im_end|>'", "'<|end|>'")), None, None);
        let llama = "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + \
                     '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}\
                     {{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}";
        check(llama, Some("Llama 3"), None);
        let mistral = "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}\
                       {{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}\
                       {{ ' ' + m['content'] + '</s>' }}{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}";
        check(mistral, Some("Mistral 0.1"), None);
        check(&mistral.replace(" [/INST]", "[/INST]"), Some("Mistral"), None);
        check("{{ messages[0]['content'] }}", None, None);
    }
}
