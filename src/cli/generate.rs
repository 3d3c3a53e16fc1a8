//! `finetune generate`: continues prompts. Text is streamed in whole characters, because a token may hold a part of
//! one.

use super::chat;
use super::invocation::Invocation;
use super::speaker::{Answer, Named, Speaker, sampling, stream};
use crate::config::Settings;
use crate::config::refusal::Refusal;
use crate::data::tokenizer::Special;
use crate::run::folder::{RUN_FILE, run_of};
use crate::run::prompt::{chat_ids, prompt_ids};
use crate::run::run_file;
use crate::support::stderr::say;
use serde_json::json;
use std::io::{IsTerminal, Read};
use std::path::Path;

/// Continues every prompt.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let json_wanted = inv.json;
    let mut sampling = sampling(s)?;
    let adapter = s.text("adapter")?.map(|dir| Named { name: "adapter".into(), dir: dir.into() });
    let turns = turns(s, adapter.as_ref().map(|a| a.dir.as_path()))?;
    let mut speaker = Speaker::open(s, adapter.as_slice())?;
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
        let mut talk = chat::Talk { speaker, sampling };
        return chat::converse(&mut std::io::stdin().lock(), inv.out.as_mut(), system.as_deref(), &mut talk);
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
