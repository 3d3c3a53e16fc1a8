//! `finetune generate`: continues prompts. Text is streamed in whole characters, because a token may hold a part of
//! one.

mod chat;

use super::invocation::Invocation;
use crate::config::groups::{self, real, recipe, whole};
use crate::config::refusal::Refusal;
use crate::config::{Settings, yaml};
use crate::data;
use crate::data::tokenizer::{Skip, Special, Tokenizer};
use crate::devices::{self, Need};
use crate::model::generate::generate;
use crate::model::lora::LoraSpec;
use crate::model::quantised::Recipe;
use crate::model::stage::{Model, Sampling};
use crate::run::adapter;
use crate::run::base_model::{self, BaseModel};
use crate::run::folder::{RUN_FILE, run_of};
use crate::run::prompt::{chat_ids, prompt_ids, turns_ids};
use crate::run::run_file;
use crate::support::stderr::{printable, say};
use serde_json::json;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

/// Continues every prompt.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let json_wanted = inv.json;
    let mut sampling = sampling(s)?;
    let adapter = s.text("adapter")?.map(PathBuf::from);
    let turns = turns(s, adapter.as_deref())?;
    let mut speaker = Speaker::open(s, adapter.as_deref())?;
    let chat = match turns {
        Turns::AsTrained if speaker.tokenizer.template().is_some() => {
            say!(
                "note: prompts are turns of the chat template, as in training; --raw continues them as they are"
            );
            true
        }
        turns => turns == Turns::Typed,
    };
    sampling.stop = speaker.base.stop_ids(&speaker.tokenizer);
    let system = s.text("system")?.map(str::to_string);
    let typed_here = s.list("prompt").is_empty() && std::io::stdin().is_terminal();
    if chat && typed_here && !json_wanted {
        let mut lines = std::io::stdin().lock();
        return chat::converse(&mut lines, inv.out.as_mut(), system.as_deref(), &mut |turns, out| {
            let bytes = turns.iter().map(|turn| turn.to_string().len()).sum();
            let ids = data::bounded(&"the conversation", (bytes, usize::MAX), || {
                turns_ids(&speaker.tokenizer, turns)
            })?;
            let Ok(sampling) = speaker.within(&sampling, ids.len()) else { return Ok(None) };
            Ok(Some(speaker.answer(&ids, &sampling, |piece| stream(out, piece))?.text))
        });
    }
    if typed_here {
        say!("type the prompt, then ctrl-D");
    }
    let prompts = prompts(s)?;
    for prompt in &prompts {
        let ids = prompt_ids(&speaker.tokenizer, prompt, |tokenizer| match chat {
            true => chat_ids(tokenizer, system.as_deref(), prompt),
            false => Ok(tokenizer.encode(prompt, Special::Add)?),
        })?;
        if ids.is_empty() {
            return Err(Refusal::failure("the prompt has no tokens: give --prompt some text"));
        }
        let sampling = speaker.within(&sampling, ids.len())?;
        if !json_wanted && prompts.len() > 1 {
            inv.say(&format!("> {prompt}"))?;
        }
        let answer = speaker.answer(&ids, &sampling, |piece| json_wanted || stream(&mut inv.out, piece))?;
        match json_wanted {
            true => {
                let Answer { text, tokens, ended } = answer;
                let line = json!({ "prompt": prompt, "text": text, "tokens": tokens, "ended": ended });
                inv.say(&line.to_string())?;
            }
            false => inv.say("")?,
        }
    }
    Ok(())
}

/// Writes a piece of an answer; false once stdout is closed.
fn stream(out: &mut dyn Write, piece: &str) -> bool {
    let on_terminal = std::io::stdout().is_terminal();
    let piece = if on_terminal { printable(piece) } else { piece.to_string() };
    write!(out, "{piece}").and_then(|()| out.flush()).is_ok()
}

/// Why prompts are turns of the chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turns {
    /// They are not.
    No,
    /// --chat.
    Typed,
    /// The rows of the adapter's training were.
    AsTrained,
}

/// The typed way, else the one of the adapter's training, where its run.yaml names it.
fn turns(s: &Settings, adapter: Option<&Path>) -> Result<Turns, Refusal> {
    let (chat, raw) = (s.switch("chat")?, s.switch("raw")?);
    if chat && raw {
        return Err(s.refuse("raw", "either --chat or --raw, not both"));
    }
    let trained = || {
        let said = adapter.and_then(|dir| run_file::fact(&run_of(dir).join(RUN_FILE), run_file::PROMPTS));
        said.is_some_and(|prompts| prompts == run_file::CHAT)
    };
    let turns = match chat {
        true => Turns::Typed,
        false if !raw && !s.is_given("chat") && trained() => Turns::AsTrained,
        false => Turns::No,
    };
    if turns == Turns::No && s.is_given("system") {
        return Err(s.refuse("system", "goes with --chat"));
    }
    Ok(turns)
}

fn sampling(s: &Settings) -> Result<Sampling, Refusal> {
    let temperature = real(s, "temperature", |v| v.is_finite() && v >= 0.0, "must be finite and at least 0")?;
    let top_p = real(s, "top-p", |v| v > 0.0 && v <= 1.0, "must be above 0 and at most 1")?;
    Ok(Sampling {
        max_new_tokens: whole(s, "max-new-tokens", 1)?.unwrap_or(256),
        temperature: temperature.unwrap_or(0.0) as f32,
        top_p: top_p.unwrap_or(1.0) as f32,
        seed: s.parse("seed", "a whole number of at most 64 bits")?.unwrap_or(42),
        stop: Vec::new(),
    })
}

/// --prompt, or all of stdin as one prompt.
fn prompts(s: &Settings) -> Result<Vec<String>, Refusal> {
    if !s.list("prompt").is_empty() {
        return Ok(s.list("prompt").to_vec());
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|e| Refusal::failure(format!("stdin: {e}")))?;
    match text.trim_end_matches('\n') {
        "" => Err(Refusal::usage("nothing to continue: give --prompt TEXT, or text on stdin")),
        text => Ok(vec![text.to_string()]),
    }
}

/// The model of an adapter's training, where its folder names it: in run.yaml, else in the adapter's config.
fn base_of(dir: &Path) -> Result<Option<String>, Refusal> {
    let config = adapter::read(dir)?.config;
    let typed = yaml::read(&run_of(dir).join(RUN_FILE)).unwrap_or_default();
    let model = typed.iter().find(|t| t.key == "model").map(|t| t.values.concat());
    Ok(model.or(config.base_model_name_or_path))
}

/// Quantisation of the base: the typed one, else the one of the adapter's training.
pub fn recipe_of(s: &Settings, adapter: Option<&Path>) -> Result<Option<Recipe>, Refusal> {
    // `none` is a valid value: an adapter may be used on the unquantised base.
    let Some(adapter) = adapter.filter(|_| !s.is_given("quantize")) else { return recipe(s) };
    let typed = yaml::read(&run_of(adapter).join(RUN_FILE)).unwrap_or_default();
    let named = typed.iter().find(|t| t.key == "quantize").map(|t| t.values.concat());
    Ok(named
        .filter(|name| !name.is_empty() && name != "none")
        .map(|name| Recipe::named(&name))
        .transpose()?)
}

/// The named model, else the one that the adapter was trained on.
pub fn model_name(s: &Settings, adapter: Option<&Path>) -> Result<String, Refusal> {
    if let Some(adapter) = adapter
        && !s.is_given("model")
    {
        return base_of(adapter)?.ok_or_else(|| {
            Refusal::usage(format!(
                "{}: does not say what it was trained on: name the MODEL",
                adapter.display()
            ))
        });
    }
    Ok(s.text("model")?.unwrap_or(crate::config::demo::NAME).to_string())
}

/// The typed chat template, else the one of the adapter's training, which its folder contains.
pub fn template_of(s: &Settings, adapter: Option<&Path>) -> Result<Option<String>, Refusal> {
    let trained = adapter.map(|a| a.join("chat_template.jinja")).filter(|p| p.exists());
    Ok(match s.text("chat-template")? {
        Some(t) => Some(t.to_string()),
        None => trained.map(|p| p.display().to_string()),
    })
}

/// A model with its tokenizer, for generation.
struct Speaker {
    base: BaseModel,
    tokenizer: Tokenizer,
    model: Box<dyn Model>,
}

/// A generated answer.
struct Answer {
    text: String,
    tokens: usize,
    ended: &'static str,
}

impl Speaker {
    fn open(s: &Settings, adapter: Option<&Path>) -> Result<Self, Refusal> {
        let devices = devices::choose(&groups::devices(s)?)?;
        let mut base = base_model::open_as(&model_name(s, adapter)?, recipe_of(s, adapter)?)?;
        let tokenizer = base.tokenizer(template_of(s, adapter)?.as_deref())?;
        let loaded = adapter.map(|dir| adapter::load(dir, &base)).transpose()?;
        let (config, spec) = match &loaded {
            Some(l) => (&l.config, l.spec.clone()),
            None => (&base.config, LoraSpec::none()),
        };
        if config.labels.is_some() {
            return Err(Refusal::configuration("a classifier does not generate: use `finetune predict`"));
        }
        let mut model = devices::open(&devices, (config, &base.files.tensors, &spec), None, Need::SPEECH)?;
        if let Some(l) = &loaded {
            model.set_parameters(&l.flat)?;
        }
        Ok(Speaker { base, tokenizer, model })
    }

    /// `sampling`, limited to the model's context; refused where the `tokens` of a prompt fill the context.
    fn within(&self, sampling: &Sampling, tokens: usize) -> Result<Sampling, Refusal> {
        let most = self.base.config.max_positions;
        match most.saturating_sub(tokens) {
            0 => Err(Refusal::failure(format!(
                "the prompt has {tokens} tokens, the model sees {most}: shorten it"
            ))),
            room => Ok(Sampling { max_new_tokens: sampling.max_new_tokens.min(room), ..sampling.clone() }),
        }
    }

    fn answer(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        mut piece: impl FnMut(&str) -> bool,
    ) -> Result<Answer, Refusal> {
        let mut text = Stream::default();
        let tokenizer = &self.tokenizer;
        let decode = |ids: &[u32]| tokenizer.decode(ids, Skip::Special).unwrap_or_default();
        let made =
            generate(&mut *self.model, prompt, sampling, &mut |id| match sampling.stop.contains(&id) {
                true => false,
                false => piece(&text.push(id, &decode)),
            })?;
        piece(&text.rest(&decode));
        let stopped = made.last().is_some_and(|id| sampling.stop.contains(id));
        let ids = &made[..made.len() - usize::from(stopped)];
        let ended = if stopped { "stop" } else { "length" };
        Ok(Answer { text: decode(ids), tokens: ids.len(), ended })
    }
}

/// Converts tokens to text in pieces of whole characters.
#[derive(Default)]
struct Stream {
    ids: Vec<u32>,
    /// Index of the first decoded id. Decoding starts at ids that are already shown, because some tokenizers treat a
    /// first token differently.
    from: usize,
    shown: usize,
}

impl Stream {
    /// Returns the text that is complete after `id`.
    fn push(&mut self, id: u32, decode: &impl Fn(&[u32]) -> String) -> String {
        self.ids.push(id);
        let text = decode(&self.ids[self.from..]);
        // U+FFFD at the end: the token ends inside a character.
        if text.ends_with('\u{fffd}') { String::new() } else { self.take(text, decode) }
    }

    /// Returns the remaining text at the end, even if its last character is incomplete.
    fn rest(&mut self, decode: &impl Fn(&[u32]) -> String) -> String {
        let text = decode(&self.ids[self.from..]);
        self.take(text, decode)
    }

    fn take(&mut self, text: String, decode: &impl Fn(&[u32]) -> String) -> String {
        let before = decode(&self.ids[self.from..self.shown]);
        let new = text.strip_prefix(before.as_str()).unwrap_or_default().to_string();
        self.from = self.shown;
        self.shown = self.ids.len();
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_never_split() {
        // Each id is one byte; the decoder drops a space before the first token, as SentencePiece's does.
        let decode = |ids: &[u32]| {
            let bytes: Vec<u8> = ids.iter().map(|i| *i as u8).collect();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            text.strip_prefix(' ').map(str::to_string).unwrap_or(text)
        };
        let text = "a né 日本 🦀 z";
        let mut stream = Stream::default();
        let mut pieces: Vec<String> = text.bytes().map(|b| stream.push(u32::from(b), &decode)).collect();
        pieces.push(stream.rest(&decode));
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{pieces:?}");
        assert!(pieces.iter().filter(|p| !p.is_empty()).count() >= 10, "it streams: {pieces:?}");
    }
}
