//! `finetune push OUT owner/name`: uploads the adapter of a run, a merged model or a .gguf file to the Hub, as one
//! commit. (A training run uploads nothing.)

use super::invocation::Invocation;
use crate::config::refusal::Refusal;
use crate::format::hub::{Hub, Parcel, Push};
use crate::run::base_model::progress_lines;
use crate::run::folder::{RUN_FILE, run_of};
use crate::support::stderr::say;
use crate::train::checkpoint;
use serde_json::json;
use std::path::Path;

/// Uploads.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let [from, id] = &inv.positional[..] else {
        let line = "give what to upload and the repository: finetune push OUT owner/name";
        return Err(Refusal::usage(line));
    };
    let (from, id) = (Path::new(from), id.clone());
    let parcel = files(from)?;
    let s = &inv.settings;
    let default = format!("Upload {} with finetune", parcel.what);
    let message = s.text("message")?.unwrap_or(&default);
    let branch = s.text("revision")?;
    let push = Push { files: &parcel.files, branch, message, private: s.switch("private")? };
    let hub = Hub::from_environment();
    let pushed = hub.push(&id, &push, &mut progress_lines())?;
    for name in &pushed.ignored {
        say!("note: {name} is not uploaded: the repository's .gitignore names it");
    }
    for name in &pushed.stored {
        say!("note: {name} is not sent: the Hub's storage has its content already");
    }
    let page = format!("{}/{id}", hub.endpoint.trim_end_matches('/'));
    if inv.json {
        let facts = json!({
            "repository": id, "url": page, "kind": parcel.what, "commit": pushed.commit, "files": pushed.files,
            "ignored": pushed.ignored, "stored": pushed.stored,
        });
        return inv.say(&facts.to_string());
    }
    match &pushed.commit {
        Some(commit) => inv.say(&format!("{}  {page}/commit/{commit}", parcel.what)),
        None => inv.say(&format!("{}  {page} has these files already", parcel.what)),
    }
}

/// The files to upload. A checkpoint has an adapter too, but not the one that is the result of the run.
fn files(from: &Path) -> Result<Parcel, Refusal> {
    let refuse = |what: &str| Err(Refusal::configuration(format!("{}: {what}", from.display())));
    if checkpoint::is_one(from) {
        let (run, from) = (run_of(from), from.display());
        return refuse(&format!(
            "is a checkpoint: push {}, or `finetune export {from} --to peft -o ADAPTER` and push that",
            run.display()
        ));
    }
    if from.join(RUN_FILE).exists() && !from.join(crate::format::peft::CONFIG).exists() {
        return refuse("the run has no adapter yet: it writes one when it ends (--resume goes on with it)");
    }
    Ok(Parcel::of(from)?)
}
