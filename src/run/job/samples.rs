//! The prompts that a run answers before, during and after training: those of --sample-prompt, and rows of the
//! evaluation.

use super::Job;
use crate::cluster::coordinator::prompt_fits;
use crate::config::groups::{Options, Role};
use crate::config::refusal::Refusal;
use crate::data::samples::Sample;
use crate::data::tokenizer::{Skip, Special};
use crate::model::stage::Sampling;
use crate::run::prepare::Prepared;
use crate::run::prompt::{chat_ids, frame, prompt_ids};
use crate::train::{Asked, Sampler};

/// Maximum tokens of an answer to a --sample-prompt.
const SAMPLE_TOKENS: usize = 128;
/// Maximum tokens of an answer to a row, beyond those of the expected answer.
const BEYOND: usize = 16;

impl Job {
    /// The prompts, with all checks; `None` if there is none.
    pub(super) fn sampler<'a>(
        &self,
        options: &Options,
        decode: &'a dyn Fn(&[u32]) -> String,
    ) -> Result<Option<Sampler<'a>>, Refusal> {
        let (p, output) = (&self.prepared, &options.output);
        if p.config.labels.is_some() {
            return Ok(None);
        }
        let typed = |prompt: &String| {
            let ids = prompt_ids(&p.tokenizer, prompt, |tokenizer| match p.chat {
                true => chat_ids(tokenizer, None, prompt),
                false => Ok(tokenizer.encode(prompt, Special::Add)?),
            })?;
            let room = p.config.longest_text(ids.len());
            if ids.len() >= room {
                return Err(Refusal::configuration(format!(
                    "--sample-prompt: {} tokens leave no room for an answer in a text of {room} positions: shorten it",
                    ids.len()
                )));
            }
            Ok(Asked { prompt: prompt.clone(), ids, most: SAMPLE_TOKENS, expected: None })
        };
        let mut prompts = output.sample_prompts.iter().map(typed).collect::<Result<Vec<_>, Refusal>>()?;
        prompts.extend(rows(p, output.sample_rows)?);
        if options.cluster.role == Role::Coordinator {
            let fits = |asked: &Asked| prompt_fits(asked.ids.len(), p.config.vocab);
            prompts.iter().try_for_each(fits).map_err(Refusal::configuration)?;
        }
        let stop = p.base.stop_ids(&p.tokenizer);
        let seed = options.optim.seed;
        let sampling = Sampling { max_new_tokens: SAMPLE_TOKENS, temperature: 0.0, top_p: 1.0, seed, stop };
        Ok(Some(Sampler { prompts, sampling, decode }).filter(|s| !s.prompts.is_empty()))
    }
}

/// The first `most` rows of the evaluation that have a prompt and an answer.
pub fn rows(p: &Prepared, most: usize) -> Result<Vec<Asked>, Refusal> {
    let frame = p.chat.then(|| frame(&p.tokenizer)).flatten().unwrap_or_default();
    let eval = p.eval.iter().flat_map(|eval| eval.samples.iter());
    let found: Vec<Asked> = eval.filter_map(|row| asked(p, &frame, &row)).take(most).collect();
    match most > 0 && found.is_empty() {
        true => Err(Refusal::configuration(
            "--sample-rows: no row of the evaluation has a prompt before its answer and is shorter than \
             --max-seq-len: give rows with prompts (--learn all makes them answers), raise --max-seq-len, or leave \
             --sample-rows out",
        )),
        false => Ok(found),
    }
}

/// A row as a prompt: all tokens before its last answer. The text of the prompt is shown without `frame`, the parts of
/// the template before and after a user's turn.
fn asked(p: &Prepared, (before, after): &(String, String), row: &Sample) -> Option<Asked> {
    // The chosen answer of a pair.
    let whole = row.rows().next()?.end;
    // The answer of a row that was cut is not complete.
    if whole >= p.max_seq_len {
        return None;
    }
    let end = (0..whole).rev().find(|&i| row.supervised(i))? + 1;
    let start = (0..end).rev().find(|&i| !row.supervised(i))? + 1;
    // The answer would end before the row does.
    if end > p.config.longest_text(start) {
        return None;
    }
    let (ids, answer) = (&row.ids[..start], &row.ids[start..end]);
    let expected = p.tokenizer.decode(answer, Skip::Special).ok()?.trim().to_owned();
    let text = p.tokenizer.decode(ids, Skip::Nothing).ok()?;
    let text = text.strip_prefix(before.as_str()).unwrap_or(&text);
    let prompt = text.strip_suffix(after.as_str()).unwrap_or(text).trim().to_owned();
    let most = answer.len() + BEYOND;
    Some(Asked { prompt, ids: ids.to_vec(), most, expected: Some(expected) })
}
