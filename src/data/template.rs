//! Chat templates: Jinja with byte-identical output to transformers, on minijinja.
//!
//! trim_blocks and lstrip_blocks are on; loop controls, Python's methods and Python's output format are supported, as
//! are `tojson` as `json.dumps(ensure_ascii=False)`, `raise_exception` and `strftime_now`. `{% generation %}` blocks
//! are traced by two private-use characters that are inserted around them and removed after rendering. A template runs
//! at most `FUEL` instructions; its memory is limited during reading (`data::bounded`). Exception: `strftime_now` is in
//! UTC and constant for the lifetime of the template, so that rows do not change while they are read.

mod python;
mod time;

use crate::data::error::DataError;
use crate::support::panics::{caught, without_place};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde_json::Value;
use std::ops::Range;

/// Maximum number of instructions per rendering. A conversation needs a few dozen per message. An instruction that
/// copies a long text costs as little as any other, so this limits loops, not time.
const FUEL: u64 = 5_000_000;

/// Markers around the output of a generation block; planes 15 and 16 have no assigned characters.
const OPEN: char = '\u{F0000}';
const CLOSE: char = '\u{F0001}';
const MAIN: &str = "chat_template";
const TOOLS: &str = "tool_use";

/// ChatML, for `--chat-template chatml` with models that have no template.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A template that sets each variable to the value unless it is given. The line break at the end of the inserted text is
/// removed by trim_blocks, here and in transformers, so that the rest of the template is rendered as before.
pub fn with_defaults(source: &str, values: &[(String, Value)]) -> String {
    let set = |(name, value): &(String, Value)| {
        let value = literal(value);
        format!("{{%- if {name} is not defined %}}{{%- set {name} = {value} %}}{{%- endif %}}\n")
    };
    values.iter().map(set).collect::<String>() + source
}

/// A JSON value in Jinja's syntax.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::Array(items) => format!("[{}]", items.iter().map(literal).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let pair = |(key, value): (&String, &Value)| {
                format!("{}: {}", Value::from(key.as_str()), literal(value))
            };
            format!("{{{}}}", map.iter().map(pair).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Name and text of each special token in the model's files (`bos_token`, `eos_token` ...).
#[derive(Debug, Clone, Default)]
pub struct SpecialTokens(pub Vec<(String, String)>);

impl SpecialTokens {
    /// The text of the special token `name`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, t)| t.as_str())
    }
}

/// The end of a rendered conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The header of the assistant's next turn (`add_generation_prompt`).
    GenerationPrompt,
    /// The last turn.
    Turn,
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The output of the template.
    pub text: String,
    /// Byte ranges of the generation blocks, in order; None if the template has no generation blocks.
    pub generation: Option<Vec<Range<usize>>>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    /// The compiled templates, or the compile error, which is reported on first use.
    env: Result<Environment<'static>, String>,
    specials: SpecialTokens,
    /// Whether the main template has generation blocks; `tools_trace` is the same for the tools template.
    traces: bool,
    tools_trace: bool,
    source: String,
}

impl ChatTemplate {
    /// Compiles a template; `with_tools` replaces `source` for conversations with tools.
    pub fn new(source: &str, with_tools: Option<&str>, specials: SpecialTokens) -> Self {
        Self::at(time::now(), source, with_tools, specials)
    }

    /// Same as `new`, with the time for `strftime_now` (seconds since 1970, UTC).
    pub fn at(now: i64, source: &str, with_tools: Option<&str>, specials: SpecialTokens) -> Self {
        let (main, traces) = trace_generation(source);
        let (tools, tools_trace) = with_tools.map(trace_generation).unzip();
        let env = environment(now).and_then(|mut env| {
            env.add_template_owned(MAIN, main).map_err(|e| flat(&e))?;
            if let Some(tools) = tools {
                env.add_template_owned(TOOLS, tools).map_err(|e| flat(&e))?;
            }
            Ok(env)
        });
        ChatTemplate {
            env,
            specials,
            traces,
            tools_trace: tools_trace == Some(true),
            source: source.to_owned(),
        }
    }

    /// Returns the compile error, if any.
    pub fn check(&self) -> Result<(), DataError> {
        self.env.as_ref().map(|_| ()).map_err(|e| DataError::Template(e.clone()))
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation: a list of {role, content, ...}, and tools if there are any.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        ending: Ending,
    ) -> Result<String, DataError> {
        Ok(self.render_traced(messages, tools, ending)?.text)
    }

    /// The text of a conversation, with the byte ranges of its generation blocks.
    pub fn render_traced(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        ending: Ending,
    ) -> Result<Rendered, DataError> {
        let env = self.env.as_ref().map_err(|e| DataError::Template(e.clone()))?;
        let name = if tools.is_some() && env.get_template(TOOLS).is_ok() { TOOLS } else { MAIN };
        let template = env.get_template(name).map_err(|e| DataError::Template(flat(&e)))?;
        let mut context: Vec<(&str, Jinja)> =
            self.specials.0.iter().map(|(n, t)| (n.as_str(), Jinja::from(t.as_str()))).collect();
        context.push(("messages", python::from_json(&python::normalise(messages))));
        context.push(("tools", tools.map_or_else(|| Jinja::from(()), python::from_json)));
        context.push(("documents", Jinja::from(())));
        context.push(("add_generation_prompt", Jinja::from(ending == Ending::GenerationPrompt)));
        // minijinja panics if a template reverses an empty list.
        let rendered = caught(|| template.render(Jinja::from_pairs(context)));
        let rendered = rendered.map_err(|panic| DataError::Template(without_place(&panic).to_owned()))?;
        let text = rendered.map_err(|e| DataError::Template(flat(&e)))?;
        let traces = if name == TOOLS { self.tools_trace } else { self.traces };
        Ok(if traces { cut_out(&text) } else { Rendered { text, generation: None } })
    }
}

fn environment(now: i64) -> Result<Environment<'static>, String> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|e| flat(&e))?);
    env.set_unknown_method_callback(python::method);
    env.set_formatter(python::format);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.add_filter("tojson", python::tojson);
    env.add_filter("string", |v: &Jinja| python::str(v));
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_test("number", |v: &Jinja| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_function("raise_exception", |message: String| -> Result<Jinja, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", move |format: String| time::strftime(now, &format));
    Ok(env)
}

/// An error and its causes in one line.
fn flat(error: &minijinja::Error) -> String {
    let line = error.line().map_or(String::new(), |l| format!(" (line {l} of the template)"));
    match error.detail() {
        _ if error.kind() == ErrorKind::OutOfFuel => {
            let millions = FUEL / 1_000_000;
            format!(
                "runs more than {millions} million instructions for this conversation{line}: use another one"
            )
        }
        Some(detail) => format!("{detail}{line}"),
        None => format!("{}{line}", error.kind()),
    }
}

/// Replaces generation blocks by blocks that minijinja has, and keeps the whitespace marks of each tag. The replacement
/// is `with`, which also opens a scope; white space is trimmed alike for all block tags.
fn trace_generation(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut any) = (String::with_capacity(source.len()), source, false);
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start + 2..].find("%}").map(|length| length + 2) else { break };
        let tag = &rest[start + 2..start + length];
        let left = tag.strip_prefix(['-', '+']).map_or("", |_| &tag[..1]);
        let right = tag.strip_suffix(['-', '+']).map_or("", |_| &tag[tag.len() - 1..]);
        let word = tag[left.len()..tag.len().max(left.len() + right.len()) - right.len()].trim();
        out.push_str(&rest[..start]);
        match word {
            "generation" => {
                any = true;
                out += &format!("{{%{left} with %}}{{{{ '{OPEN}' }}}}{{% if true {right}%}}");
            }
            "endgeneration" => {
                out += &format!("{{%{left} endif %}}{{{{ '{CLOSE}' }}}}{{% endwith {right}%}}")
            }
            _ => out.push_str(&rest[start..start + length + 2]),
        }
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    (out, any)
}

/// Removes the markers from a text and returns their positions as spans.
fn cut_out(marked: &str) -> Rendered {
    let mut text = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    let mut open = None;
    for c in marked.chars() {
        match c {
            OPEN => open = Some(text.len()),
            CLOSE => spans.extend(open.take().map(|start| start..text.len())),
            c => text.push(c),
        }
    }
    Rendered { text, generation: Some(spans) }
}
