//! A model that answers, with its tokenizer and its adapters: what `generate`, `chat` and `serve` share.

use crate::config::groups::{self, filled, real, recipe, whole};
use crate::config::refusal::Refusal;
use crate::config::{Settings, yaml};
use crate::data::Task;
use crate::data::tokenizer::{Skip, Tokenizer};
use crate::devices::{self, Need};
use crate::model::config::Config;
use crate::model::decoder::base_parameters;
use crate::model::generate::generate;
use crate::model::lora::LoraSpec;
use crate::model::quantised::Recipe;
use crate::model::stage::{Fault, Model, Sampling};
use crate::run::adapter::{self, Loaded};
use crate::run::base_model::{self, BaseModel};
use crate::run::folder::{RUN_FILE, run_of};
use crate::support::stderr::printable;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of the model without an adapter, where its own is not used.
pub const BASE: &str = "base";

/// An adapter as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The typed name, else that of the folder.
    pub name: String,
    /// Folder of a run, of a checkpoint or of a PEFT adapter.
    pub dir: PathBuf,
}

/// The adapters of --adapter, each DIR or NAME=DIR.
pub fn adapters(s: &Settings) -> Result<Vec<Named>, Refusal> {
    let mut all: Vec<Named> = Vec::new();
    for text in s.list("adapter") {
        let (name, dir) = match text.split_once('=').filter(|_| !Path::new(text).exists()) {
            Some((name, dir)) => (name.to_string(), PathBuf::from(dir)),
            None => {
                let dir = PathBuf::from(text);
                let whole = dir.canonicalize().unwrap_or_else(|_| dir.clone());
                let last = whole.file_name().map(|name| name.to_string_lossy().into_owned());
                (last.unwrap_or_default(), dir)
            }
        };
        if name.is_empty() || name == BASE || name.contains(char::is_whitespace) {
            let why =
                format!("{text:?}: an adapter needs a name without spaces, other than {BASE}: NAME=DIR");
            return Err(s.refuse("adapter", why));
        }
        if all.iter().any(|other| other.name == name) {
            return Err(s.refuse("adapter", format!("two adapters have the name {name}: give NAME=DIR")));
        }
        all.push(Named { name, dir });
    }
    Ok(all)
}

/// The options of sampling.
pub fn sampling(s: &Settings) -> Result<Sampling, Refusal> {
    let temperature = real(s, "temperature", |v| v.is_finite() && v >= 0.0, "must be finite and at least 0")?;
    let top_p = real(s, "top-p", |v| v > 0.0 && v <= 1.0, "must be above 0 and at most 1")?;
    let seed = s.parse("seed", "a whole number of at most 64 bits")?;
    Ok(Sampling {
        max_new_tokens: filled(s, "max-new-tokens", whole(s, "max-new-tokens", 1)?)?,
        temperature: filled(s, "temperature", temperature)? as f32,
        top_p: filled(s, "top-p", top_p)? as f32,
        seed: filled(s, "seed", seed)?,
        stop: Vec::new(),
    })
}

/// The model of an adapter's training, where its folder names it: in run.yaml, else in the adapter's config.
fn base_of(dir: &Path) -> Result<Option<String>, Refusal> {
    let named = adapter::base_of(dir)?;
    let typed = yaml::read(&run_of(dir).join(RUN_FILE)).unwrap_or_default();
    let model = typed.iter().find(|t| t.key == "model").map(|t| t.values.concat());
    Ok(model.or(named))
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

/// What a model is asked for: the typed task, as far as its head can do it.
pub fn task_of(config: &Config, typed: Task) -> Task {
    match (&config.labels, typed) {
        (Some(outputs), Task::Reward) if outputs.len() == 1 && !config.tags => Task::Reward,
        (Some(_), _) if config.tags => Task::Tag,
        (Some(_), Task::Regress) => Task::Regress,
        (Some(_), _) if config.numbers => Task::Regress,
        (Some(_), _) => Task::Classify,
        (None, typed) => typed,
    }
}

/// Sets missing options from the run of an adapter.
pub fn as_trained(s: &mut Settings, adapter: &Path, names: &[&'static str]) -> Result<(), Refusal> {
    let file = run_of(adapter).join(RUN_FILE);
    let typed = if file.exists() { yaml::read(&file)? } else { Vec::new() };
    for name in names.iter().filter(|name| !s.is_given(name)).collect::<Vec<_>>() {
        if let Some(of_run) = typed.iter().find(|t| t.key == name.replace('-', "_")) {
            s.put(name, of_run.values.clone(), of_run.source.clone());
        }
    }
    Ok(())
}

/// A model without adapter, or with the values of one.
pub struct Voice {
    /// [`BASE`], or the adapter's name.
    pub name: String,
    flat: Vec<f32>,
}

/// A model with its tokenizer, for generation.
pub struct Speaker {
    /// The base model's files.
    pub base: BaseModel,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The model on its device.
    pub model: Box<dyn Model>,
    /// The base, then its adapters.
    pub voices: Vec<Voice>,
    /// Number of the voice whose values the model has.
    now: usize,
}

/// A generated answer.
pub struct Answer {
    /// Without special tokens.
    pub text: String,
    /// Number of tokens without the one that ends the answer.
    pub tokens: usize,
    /// `stop` or `length`.
    pub ended: &'static str,
}

impl Speaker {
    /// Opens the model with these adapters, and lets the first of them speak.
    pub fn open(s: &Settings, adapters: &[Named]) -> Result<Self, Refusal> {
        let devices = devices::choose(&groups::devices(s)?)?;
        let first = adapters.first().map(|a| a.dir.as_path());
        let mut base = base_model::open_as(&model_name(s, first)?, recipe_of(s, first)?)?;
        let template = template_of(s, first)?;
        one_base(s, adapters)?;
        adapters.iter().try_for_each(|named| base.add_tokens_of(Some(&named.dir)))?;
        let tokenizer = base.tokenizer_with(template.as_deref(), &groups::template_args(s)?)?;
        let tokenizer = Arc::new(tokenizer);
        let loaded = adapters.iter().map(|a| adapter::load(&a.dir, &base)).collect::<Result<Vec<_>, _>>()?;
        let (config, spec) = match loaded.first() {
            Some(l) => (&l.config, l.spec.clone()),
            None => (&base.config, LoraSpec::none()),
        };
        if config.labels.is_some() {
            return Err(Refusal::configuration("a classifier does not generate: use `finetune predict`"));
        }
        agree(adapters, &loaded)?;
        let model = devices::open(&devices, (config, &base.files.tensors, &spec), None, Need::SPEECH)?;
        let flat = base_parameters(model.layout(), &spec, &*base.files.tensors)?;
        let none = Voice { name: BASE.into(), flat };
        let tuned = adapters.iter().zip(loaded);
        let tuned = tuned.map(|(named, l)| Voice { name: named.name.clone(), flat: l.flat });
        let voices: Vec<Voice> = std::iter::once(none).chain(tuned).collect();
        // A model starts as the base.
        let mut speaker = Speaker { base, tokenizer, model, voices, now: 0 };
        speaker.speak_as(usize::from(!adapters.is_empty()))?;
        Ok(speaker)
    }

    /// Gives the model the values of voice `which`.
    pub fn speak_as(&mut self, which: usize) -> Result<(), Fault> {
        if which != self.now {
            self.model.set_parameters(&self.voices[which].flat)?;
            self.now = which;
        }
        Ok(())
    }

    /// The number of the voice that speaks.
    pub fn now(&self) -> usize {
        self.now
    }

    /// `sampling`, limited to the model's context; refused where the `tokens` of a prompt fill the context.
    pub fn within(&self, sampling: &Sampling, tokens: usize) -> Result<Sampling, Refusal> {
        let most = self.base.config.longest_text(tokens);
        match most.saturating_sub(tokens) {
            0 => Err(Refusal::failure(format!(
                "the prompt has {tokens} tokens, and a text that begins with it ends at {most}: shorten it"
            ))),
            room => Ok(Sampling { max_new_tokens: sampling.max_new_tokens.min(room), ..sampling.clone() }),
        }
    }

    /// Continues the tokens of a prompt; `piece` gets whole characters, and returns false to stop.
    pub fn answer(
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

/// Refuses adapters whose runs name different bases, quantisations or chat templates, unless the option is given.
fn one_base(s: &Settings, adapters: &[Named]) -> Result<(), Refusal> {
    let Some((first, others)) = adapters.split_first() else { return Ok(()) };
    for other in others {
        let differs = |option: &str| {
            let (one, two) = (first.dir.display(), other.dir.display());
            let what = format!("{one} and {two} were trained with different values: give --{option}");
            Refusal::configuration(what)
        };
        if !s.is_given("model") && base_of(&first.dir)? != base_of(&other.dir)? {
            return Err(differs("model"));
        }
        if !s.is_given("quantize") && recipe_of(s, Some(&first.dir))? != recipe_of(s, Some(&other.dir))? {
            return Err(differs("quantize"));
        }
        let template = |named: &Named| {
            let path = template_of(s, Some(&named.dir))?;
            Ok::<_, Refusal>(path.and_then(|path| std::fs::read_to_string(path).ok()))
        };
        if s.text("chat-template")?.is_none() && template(first)? != template(other)? {
            return Err(differs("chat-template"));
        }
    }
    Ok(())
}

/// Refuses adapters that do not fit in each other's place.
fn agree(adapters: &[Named], loaded: &[Loaded]) -> Result<(), Refusal> {
    let Some(first) = loaded.first() else { return Ok(()) };
    match loaded.iter().position(|l| l.spec != first.spec || l.config.labels != first.config.labels) {
        None => Ok(()),
        Some(i) => {
            let (one, other) = first.spec.difference(&loaded[i].spec);
            Err(Refusal::configuration(format!(
                "--adapter: {} has {one}, {} has {other}: adapters on one base must agree in rank, alpha, modules and \
                 layers; open them one at a time",
                adapters[0].name, adapters[i].name
            )))
        }
    }
}

/// Writes a piece of an answer; false once stdout is closed.
pub fn stream(out: &mut dyn Write, piece: &str) -> bool {
    let on_terminal = std::io::stdout().is_terminal();
    let piece = if on_terminal { printable(piece) } else { piece.to_string() };
    write!(out, "{piece}").and_then(|()| out.flush()).is_ok()
}

/// Converts tokens to text in pieces of whole characters.
#[derive(Default)]
pub struct Stream {
    ids: Vec<u32>,
    /// Index of the first decoded id. Decoding starts at ids that are already shown, because some tokenizers treat a
    /// first token differently.
    from: usize,
    shown: usize,
}

impl Stream {
    /// Returns the text that is complete after `id`.
    pub fn push(&mut self, id: u32, decode: &impl Fn(&[u32]) -> String) -> String {
        self.ids.push(id);
        let text = decode(&self.ids[self.from..]);
        // U+FFFD at the end: the token ends inside a character.
        if text.ends_with('\u{fffd}') { String::new() } else { self.take(text, decode) }
    }

    /// Returns the remaining text at the end, even if its last character is incomplete.
    pub fn rest(&mut self, decode: &impl Fn(&[u32]) -> String) -> String {
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
