//! Floor 1: converts rows to tokens and to a plan.
//!
//! Rows are read in order, tokenised on all threads in chunks, and appended in order: neither the result nor the
//! reported error depends on the number of threads.

pub mod chat;
mod counts;
pub mod encode;
pub mod error;
pub mod files;
pub mod form;
pub mod labels;
pub mod learn;
pub mod new_tokens;
pub mod plan;
pub mod preview;
pub mod samples;
pub mod splits;
pub mod template;
pub mod tokenizer;

pub use counts::Counts;
pub use error::{DataError, Dropped, Place};
pub use labels::LabelMap;
pub use learn::{Learn, LongRows};
pub use samples::{Sample, Samples};
pub use tokenizer::Tokenizer;

use crate::support::allocator;
use crate::support::waiting;
use files::{Flow, Raw, RawRow};
use form::{Chat, Form, Label, Said};
use labels::Labels;
use rayon::prelude::*;
use samples::{Encoded, NO_CLASS, Thought};
use std::path::PathBuf;

/// Limits of a chunk that is tokenised together: rows, and bytes of JSON lines.
const CHUNK_ROWS: usize = 4096;
const CHUNK_BYTES: usize = 8 << 20;

/// The training task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Task {
    /// Learn to generate the supervised tokens.
    #[default]
    Sft,
    /// Learn to predict the label.
    Classify,
    /// Learn to predict numbers.
    Regress,
    /// Learn to predict the class of each word.
    Tag,
    /// Learn a reward from pairs of a chosen and a rejected answer.
    Reward,
    /// Learn from pairs of a chosen and a rejected answer.
    Pairs,
    /// Learn from answers that are wanted or not.
    Unpaired,
}

impl Task {
    /// Whether a head is trained, in place of the language model's.
    pub fn has_head(self) -> bool {
        matches!(self, Task::Regress | Task::Reward) || self.has_classes()
    }

    /// Whether the outputs of the head are classes.
    pub fn has_classes(self) -> bool {
        matches!(self, Task::Classify | Task::Tag)
    }
}

/// Options for reading rows.
#[derive(Debug, Clone)]
pub struct Options {
    /// The training task.
    pub task: Task,
    /// The supervised part of a row.
    pub learn: Learn,
    /// Pairs of a form's field and the column with its value.
    pub fields: Vec<(String, String)>,
    /// Maximum number of tokens per row.
    pub max_seq_len: usize,
    /// What is done with longer rows.
    pub long: LongRows,
    /// Number of classes; None to count the classes in the data.
    pub num_classes: Option<usize>,
    /// Known class names (from the base model or the training data): other labels are errors.
    pub labels: Option<LabelMap>,
    /// Maximum number of dropped rows; None for no limit.
    pub max_dropped: Option<u64>,
    /// Number of kept rows after which reading stops (`PlanOptions::rows_needed`). Ignored for a classifier without
    /// `labels`, because all rows are needed to find its classes.
    pub limit: Option<usize>,
    /// Number of rows of each set that are read, from its beginning; None for all.
    pub max_rows: Option<u64>,
    /// Whether rows that equal an earlier one are left out.
    pub unique: bool,
    /// Number of tokenizer threads; 0 for all.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            task: Task::Sft,
            learn: Learn::Answers,
            fields: Vec::new(),
            max_seq_len: 2048,
            long: LongRows::Cut,
            num_classes: None,
            labels: None,
            max_dropped: None,
            limit: None,
            max_rows: None,
            unique: false,
            threads: 0,
        }
    }
}

/// Tokenized rows, ready for a plan.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The kept rows.
    pub samples: Samples,
    /// Statistics of the rows read.
    pub counts: Counts,
    /// The classes of a classifier.
    pub labels: Option<LabelMap>,
    /// For each set, the position in the input data after its last row (`Sample::row`).
    pub ends: Vec<u64>,
    /// Result of `Samples::hash`, compared when a run is resumed.
    pub hash: String,
}

/// Reads all files, in the given order, into one corpus. They are one set of rows.
///
/// Errors: those of [`load_sets`].
pub fn load(paths: &[PathBuf], options: &Options, tokenizer: &Tokenizer) -> Result<Corpus, DataError> {
    load_sets(&[paths.to_vec()], options, tokenizer)
}

/// Reads the files of several sets of rows, in the given order, into one corpus.
///
/// Errors: invalid files and rows, with their position; no rows; no supervised token in any row; a label that is not a
/// class (`is_configuration`).
pub fn load_sets(
    sets: &[Vec<PathBuf>],
    options: &Options,
    tokenizer: &Tokenizer,
) -> Result<Corpus, DataError> {
    if options.max_seq_len == 0 {
        return Err(DataError::Options("--max-seq-len must be at least 1".into()));
    }
    form::check_fields(&options.fields)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads)
        .build()
        .map_err(|e| DataError::Options(format!("cannot start {} threads: {e}", options.threads)))?;
    let mut loader = Loader {
        options,
        tokenizer,
        pool,
        labels: Labels::new(options),
        corpus: Samples::default(),
        counts: Counts::default(),
        ends: Vec::new(),
        first_too_long: None,
        waiting: Vec::new(),
        bytes: 0,
    };
    waiting::READING.begin(0);
    for set in sets {
        loader.read(set)?;
    }
    loader.finish(sets)
}

struct Loader<'a> {
    options: &'a Options,
    tokenizer: &'a Tokenizer,
    pool: rayon::ThreadPool,
    labels: Labels,
    corpus: Samples,
    counts: Counts,
    ends: Vec<u64>,
    first_too_long: Option<Dropped>,
    waiting: Vec<RawRow>,
    bytes: usize,
}

/// A tokenised row.
struct Ready {
    /// The row, or the parts of a long row that have a supervised token.
    parts: Vec<Encoded>,
    label: Option<Label>,
    /// Labels of the row's words.
    tags: Vec<Option<Label>>,
    /// Whether a single answer is wanted.
    wanted: Option<bool>,
    /// Whether the row is longer than `max_seq_len`.
    long: bool,
    chat: bool,
    thought: Thought,
    /// Why the row has no supervised token; None if it has one.
    useless: Option<String>,
}

impl Loader<'_> {
    /// Reads a set.
    fn read(&mut self, set: &[PathBuf]) -> Result<(), DataError> {
        let mut left = self.options.max_rows.unwrap_or(u64::MAX);
        for path in set {
            if left == 0 || self.is_full() {
                break;
            }
            files::read(path, &mut |row| {
                left -= 1;
                let flow = self.take(row)?;
                Ok(if left == 0 { Flow::Stop } else { flow })
            })?;
        }
        self.drain()?;
        self.ends.push(self.counts.rows);
        Ok(())
    }

    /// Whether the limit is reached.
    fn is_full(&self) -> bool {
        self.limit().is_some_and(|limit| self.corpus.len() >= limit)
    }

    fn take(&mut self, row: RawRow) -> Result<Flow, DataError> {
        self.bytes += row.raw.bytes();
        self.waiting.push(row);
        let full = self.waiting.len() >= CHUNK_ROWS || self.bytes >= CHUNK_BYTES;
        // With a limit, a chunk has no more rows than needed.
        let enough = self.limit().is_some_and(|limit| self.corpus.len() + self.waiting.len() >= limit);
        if full || enough { self.drain() } else { Ok(Flow::Continue) }
    }

    fn limit(&self) -> Option<usize> {
        self.options.limit.filter(|_| !self.options.task.has_classes() || self.options.labels.is_some())
    }

    /// Tokenizes the waiting rows on all threads and appends them in order.
    fn drain(&mut self) -> Result<Flow, DataError> {
        self.bytes = 0;
        let rows = std::mem::take(&mut self.waiting);
        waiting::READING.add(rows.len() as u64);
        let (options, tokenizer) = (self.options, self.tokenizer);
        let ready: Vec<(Place, Result<Ready, DataError>)> =
            self.pool.install(|| rows.into_par_iter().map(|row| ready(row, options, tokenizer)).collect());
        for (place, ready) in ready {
            if self.is_full() {
                return Ok(Flow::Stop);
            }
            self.append(place, ready?)?;
        }
        Ok(if self.is_full() { Flow::Stop } else { Flow::Continue })
    }

    fn append(&mut self, place: Place, mut ready: Ready) -> Result<(), DataError> {
        let row = self.counts.rows;
        self.counts.rows += 1;
        let long = |done| u64::from(ready.long && self.options.long == done);
        self.counts.truncated += long(LongRows::Cut);
        self.counts.too_long += long(LongRows::Drop);
        self.counts.split.0 += long(LongRows::Split);
        self.counts.split.1 += long(LongRows::Split) * ready.parts.len() as u64;
        self.counts.chat += u64::from(ready.chat);
        self.counts.empty_thoughts += u64::from(ready.thought.empty);
        self.counts.lost_thoughts += u64::from(ready.thought.lost);
        let label = ready.label.map(|l| self.labels.class(l, &place)).transpose()?;
        let label = label.or(ready.wanted.map(u32::from));
        let tags = ready.tags.into_iter();
        let tags = tags.map(|tag| tag.map_or(Ok(NO_CLASS), |tag| self.labels.class(tag, &place)));
        let tags = tags.collect::<Result<Vec<u32>, _>>()?;
        for class in ready.parts.iter_mut().flat_map(|part| &mut part.classes) {
            // So far the number of the word.
            *class = tags.get(*class as usize).copied().unwrap_or(NO_CLASS);
        }
        match ready.useless {
            None => {
                let (first, width) = (self.corpus.is_empty(), self.corpus.width());
                let uneven = |part: &&Encoded| !first && part.values.len() != width;
                if let Some(part) = ready.parts.iter().find(uneven) {
                    let reason =
                        format!("`label` has {} numbers, earlier rows have {width}", part.values.len());
                    return Err(DataError::Row { place, reason });
                }
                ready.parts.iter().for_each(|part| self.corpus.push(row, part, label));
            }
            Some(why) => {
                let left_out = ready.long && self.options.long == LongRows::Drop;
                let first = if left_out { &mut self.first_too_long } else { &mut self.counts.first_dropped };
                self.counts.dropped += u64::from(!left_out);
                first.get_or_insert(Dropped { place, why });
            }
        }
        Ok(())
    }

    fn finish(mut self, sets: &[Vec<PathBuf>]) -> Result<Corpus, DataError> {
        let files = || sets.iter().flatten().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        let (dropped, rows) = (self.counts.dropped, self.counts.rows);
        match self.counts.first_dropped.as_ref().or(self.first_too_long.as_ref()) {
            _ if rows == 0 => return Err(DataError::NoRows { files: files() }),
            Some(first) if dropped + self.counts.too_long == rows => {
                return Err(DataError::NothingSupervised { files: files(), rows, first: first.clone() });
            }
            Some(first) if self.options.max_dropped.is_some_and(|allowed| dropped > allowed) => {
                let allowed = self.options.max_dropped.unwrap_or(0);
                return Err(DataError::TooManyDropped { dropped, rows, first: first.clone(), allowed });
            }
            _ => {}
        }
        let labels = match self.options.task {
            Task::Classify | Task::Tag => Some(self.labels.settle(&mut self.corpus)),
            Task::Regress | Task::Reward | Task::Sft | Task::Pairs | Task::Unpaired => None,
        };
        if self.options.unique {
            let repeated = self.corpus.repeated();
            self.counts.duplicates = repeated.iter().filter(|again| **again).count() as u64;
            self.corpus = self.corpus.select(|i| !repeated[i]);
        }
        self.corpus.shrink();
        Ok(Corpus::of(self.corpus, self.counts, labels, self.ends))
    }
}

fn ready(row: RawRow, options: &Options, tokenizer: &Tokenizer) -> (Place, Result<Ready, DataError>) {
    let RawRow { place, raw } = row;
    let sizes = (raw.bytes(), options.most());
    let ready = bounded(&place, sizes, || tokens(raw, &place, options, tokenizer));
    (place, ready)
}

impl Options {
    /// Number of tokens of a row that are needed.
    fn most(&self) -> usize {
        if self.long == LongRows::Split { usize::MAX } else { self.max_seq_len }
    }

    /// Why a long row is left out or has no supervised token.
    fn too_long(&self) -> String {
        let most = self.max_seq_len;
        match self.long {
            LongRows::Drop => format!("it has more than {most} tokens (--long-rows drop)"),
            _ => format!("its first {most} tokens (--max-seq-len) hold no answer"),
        }
    }
}

fn tokens(raw: Raw, place: &Place, options: &Options, tokenizer: &Tokenizer) -> Result<Ready, DataError> {
    let fault = |reason: String| DataError::Row { place: place.clone(), reason };
    let row = raw.parse().map_err(fault)?;
    let form = form::of(&row, options).map_err(fault)?;
    let weight = form::weight(&row, options).map_err(fault)?;
    let ready = match &form {
        Form::Answers { said, wanted } => {
            let margin = form::margin(&row, options).map_err(fault)?;
            let values = if options.task == Task::Reward { vec![margin] } else { Vec::new() };
            answered((said, *wanted), values, (options, tokenizer))
        }
        _ => learnt((&form, weight), options, tokenizer),
    };
    let ready = ready.map_err(|e| e.at(place))?;
    if ready.long && options.long == LongRows::Refuse {
        return Err(fault(format!(
            "it has more than {} tokens (--max-seq-len): raise this number, shorten the row, or choose another --long-rows",
            options.max_seq_len
        )));
    }
    Ok(ready)
}

fn learnt(
    (form, weight): (&Form, f32),
    options: &Options,
    tokenizer: &Tokenizer,
) -> Result<Ready, DataError> {
    let (mut encoded, label) = encode::encode(form, tokenizer, (options.learn, options.most()))?;
    encoded.weight = weight;
    let most = options.max_seq_len;
    let long = encoded.ids.len() > most;
    let split = long && options.long == LongRows::Split;
    let thought = encoded.thought;
    let parts = match split {
        true => encoded.split(most),
        false => {
            encoded.cut(most);
            vec![encoded]
        }
    };
    let cut = (long && !split).then(|| options.too_long());
    let useless = match options.long {
        LongRows::Drop if long => cut,
        _ => useless(form, &parts, options, cut),
    };
    let label = label.filter(|label| !is_empty(label, options));
    let tags = if let Form::Words { tags, .. } = form { tags.clone() } else { Vec::new() };
    let chat = tokenizer.template().is_some() && matches!(form, Form::Alpaca(_) | Form::Chat(_));
    Ok(Ready { parts, label, tags, wanted: None, long, chat, thought, useless })
}

fn answered(
    (said, wanted): (&Said, Option<bool>),
    values: Vec<f32>,
    (options, tokenizer): (&Options, &Tokenizer),
) -> Result<Ready, DataError> {
    let encode::Answered { encoded, cut, nothing } = encode::answers(said, tokenizer, options.max_seq_len)?;
    let encoded = Encoded { values, ..encoded };
    let why = if cut { options.too_long() } else { "an answer is empty".into() };
    let useless = (nothing || cut && options.long == LongRows::Drop).then_some(why);
    let chat = tokenizer.template().is_some() && !matches!(said, Said::Text { .. });
    let thought = Thought::default();
    let (label, tags) = (None, Vec::new());
    Ok(Ready { parts: vec![encoded], label, tags, wanted, long: cut, chat, thought, useless })
}

/// Whether a label is an empty cell and no class has that name.
fn is_empty(label: &Label, options: &Options) -> bool {
    let known = options.labels.as_ref().is_some_and(|known| known.class(label).is_some());
    !known && matches!(label, Label::Name(name) if name.trim().is_empty())
}

/// Why a row has no supervised token; None if it has one. `cut` is the reason for a truncated row.
fn useless(form: &Form, parts: &[Encoded], options: &Options, cut: Option<String>) -> Option<String> {
    match form {
        Form::Class { label, .. } if is_empty(label, options) => Some("its label is empty".into()),
        Form::Numbers { values, .. } if values.is_empty() => Some("its label is empty".into()),
        Form::Class { .. } | Form::Numbers { .. } => {
            parts.iter().all(|part| part.ids.is_empty()).then(|| "its text is empty".into())
        }
        _ if parts.iter().any(|part| part.targets() > 0) => None,
        Form::Words { .. } => Some(cut.unwrap_or_else(|| "none of its words has a label".into())),
        Form::Chat(chat) => Some(unlearnt(chat, options.learn, cut)),
        Form::Alpaca(_) => {
            Some(cut.unwrap_or_else(|| "its output is empty, or the chat template marks none".into()))
        }
        _ => Some(cut.unwrap_or_else(|| "its text is empty".into())),
    }
}

/// Why a conversation has no supervised token.
fn unlearnt(chat: &Chat, learn: Learn, cut: Option<String>) -> String {
    let unanswered = chat.unanswered().filter(|_| matches!(learn, Learn::Answers | Learn::Last));
    let why = match (learn, chat.is_marked()) {
        (_, true) => "no message with a text is trained on: their marks (train, training, weight) say so",
        (Learn::Marked, _) => "no message is marked with `train: true` (--learn marked)",
        _ => "its assistant turns are empty, or the chat template marks none",
    };
    unanswered.or(cut).unwrap_or_else(|| why.into())
}

/// Memory limits in bytes: for each byte of a row (the row, its fields, its rendered text), for each tokenised byte,
/// and a constant.
const READING: usize = 12;
const TOKENISING: usize = 256;
const BESIDES: usize = 256 << 20;

/// Runs a conversion of `bytes` of input to at most `most` tokens. If a chat template or a tokenizer.json multiplies
/// the text beyond the memory limit, the process ends with one line that names `place`.
pub fn bounded<T>(
    place: &dyn std::fmt::Display,
    (bytes, most): (usize, usize),
    run: impl FnOnce() -> T,
) -> T {
    let tokenised = bytes.min(tokenizer::reach(most)).saturating_mul(TOKENISING);
    let limit = bytes.saturating_mul(READING).saturating_add(tokenised).saturating_add(BESIDES);
    let line = format!(
        "{place}: its tokens take more than {} MB of memory: the chat template or tokenizer.json multiplies the \
         text: use another --chat-template, or the files of the model's page",
        limit / 1_000_000
    );
    allocator::within(limit, line, run)
}

impl Corpus {
    fn of(samples: Samples, mut counts: Counts, labels: Option<LabelMap>, ends: Vec<u64>) -> Corpus {
        counts.tokens = samples.total_tokens();
        counts.weighted = samples.iter().filter(|sample| sample.weight != 1.0).count() as u64;
        counts.weights = samples.iter().fold([f32::MAX, f32::MIN], |[least, most], sample| {
            [least.min(sample.weight), most.max(sample.weight)]
        });
        counts.supervised = match (labels.is_some() || samples.width() > 0) && !samples.have_classes() {
            true => samples.len() as u64,
            false => samples.total_targets(),
        };
        let hash = samples.hash();
        Corpus { samples, counts, labels, ends, hash }
    }

    /// Whether each row has a class, or numbers.
    pub fn is_labelled(&self) -> bool {
        self.labels.is_some() || self.samples.width() > 0
    }

    /// The kept rows of each set.
    pub fn sets(&self) -> Vec<std::ops::Range<usize>> {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts
            .zip(&self.ends)
            .map(|(start, end)| self.samples.before(*start)..self.samples.before(*end))
            .collect()
    }

    /// Splits the corpus into (train, eval). The evaluation part gets `fraction` of the rows, at least one, selected by
    /// `seed`; both parts keep the order of the data, and parts of one row go to one side. The counts of rows read stay
    /// with the training part.
    ///
    /// Errors: a fraction that is not between 0 and 1, or that leaves one part without rows.
    pub fn split(self, fraction: f64, seed: u64) -> Result<(Corpus, Corpus), DataError> {
        let n = self.samples.len();
        if !(fraction > 0.0 && fraction < 1.0) {
            return Err(DataError::Options(format!(
                "--eval-split must be between 0 and 1, it is {fraction}"
            )));
        }
        let wanted = ((n as f64 * fraction).round() as usize).max(1);
        if wanted >= n {
            return Err(DataError::Options(format!(
                "--eval-split {fraction} of {n} rows leaves none to train on"
            )));
        }
        let mut leaves = vec![false; n];
        let order = crate::numeric::rng::permutation(n, &[seed, SPLIT]);
        order[..wanted].iter().for_each(|&i| leaves[i as usize] = true);
        // The parts of a long row stay together.
        for i in 1..n {
            if self.samples.get(i).row == self.samples.get(i - 1).row {
                leaves[i] = leaves[i - 1];
            }
        }
        if leaves.iter().all(|leaf| *leaf == leaves[0]) {
            return Err(DataError::Options(format!(
                "--eval-split {fraction} of {n} parts of long rows leaves one side without rows"
            )));
        }
        let eval = self.samples.select(|i| leaves[i]);
        let train = self.samples.select(|i| !leaves[i]);
        let read = Counts { rows: eval.len() as u64, ..Counts::default() };
        let (labels, ends) = (self.labels, self.ends);
        let train = Corpus::of(train, self.counts, labels.clone(), ends.clone());
        Ok((train, Corpus::of(eval, read, labels, ends)))
    }
}

/// Distinguishes the random numbers of the split from others with the same seed.
const SPLIT: u64 = 0x7370_6c69_7400_0001;
