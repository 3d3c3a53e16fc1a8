//! Chat templates: Jinja as transformers runs it, byte for byte, on minijinja.
//!
//! trim_blocks and lstrip_blocks on, loop controls, Python's methods and Python's way of printing values,
//! `tojson` as `json.dumps(ensure_ascii=False)`, `raise_exception`, `strftime_now`. `{% generation %}` blocks are
//! traced by two private-use characters that are put around them while rendering and cut out after it.
//! A template runs `FUEL` instructions at most; its memory is bounded where rows are read (`data::bounded`).
//! The exception: `strftime_now` is UTC, and one moment for the whole life of the template, so that rows
//! do not change while they are read.

mod python;
mod time;

use crate::data::error::DataError;
use crate::support::panics::caught;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde_json::Value;
use std::ops::Range;

/// Instructions of one rendering: seconds of work. A conversation takes a few dozen a message.
const FUEL: u64 = 50_000_000;

/// Put before and after what a generation block renders; planes 15 and 16 have no characters of their own.
const OPEN: char = '\u{F0000}';
const CLOSE: char = '\u{F0001}';
const MAIN: &str = "chat_template";
const TOOLS: &str = "tool_use";

/// ChatML, for `--chat-template chatml` on models that have no template.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Name and text of each special token that the model's files name (`bos_token`, `eos_token` ...).
#[derive(Debug, Clone, Default)]
pub struct SpecialTokens(pub Vec<(String, String)>);

impl SpecialTokens {
    /// The text of one, by name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, t)| t.as_str())
    }
}

/// What stands at the end of a rendered conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The header of the assistant's next turn (`add_generation_prompt`).
    GenerationPrompt,
    /// Nothing more than the last turn.
    Turn,
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// What the template put out.
    pub text: String,
    /// Byte ranges of its generation blocks, in order; None if the template has none at all.
    pub generation: Option<Vec<Range<usize>>>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    /// A template that does not compile says so when it is used.
    env: Result<Environment<'static>, String>,
    specials: SpecialTokens,
    /// Whether the template, and the one for tools, has generation blocks.
    traces: bool,
    tools_trace: bool,
    source: String,
}

impl ChatTemplate {
    /// Compiles; `with_tools` is used in place of `source` for conversations that carry tools.
    pub fn new(source: &str, with_tools: Option<&str>, specials: SpecialTokens) -> Self {
        Self::at(time::now(), source, with_tools, specials)
    }

    /// As `new`, with the moment that `strftime_now` shows (seconds since 1970, UTC).
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

    /// An error where the template does not compile.
    pub fn check(&self) -> Result<(), DataError> {
        self.env.as_ref().map(|_| ()).map_err(|e| DataError::Template(e.clone()))
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation: a list of {role, content, ...}, and tools where there are some.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        ending: Ending,
    ) -> Result<String, DataError> {
        Ok(self.render_traced(messages, tools, ending)?.text)
    }

    /// The text, and where in it the generation blocks are.
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
        // The library panics where a template reverses an empty list.
        let rendered = caught(|| template.render(Jinja::from_pairs(context)));
        let rendered = rendered.map_err(|panic| {
            DataError::Template(panic.split(" (at ").next().unwrap_or(&panic).to_string())
        })?;
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

/// One line for an error and its causes.
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

/// Rewrites generation blocks into blocks that minijinja knows, keeping each tag's whitespace marks:
/// `with`, because like the original it opens a scope, and because block tags trim alike.
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

/// Takes the marks out of a text and says where they stood.
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
