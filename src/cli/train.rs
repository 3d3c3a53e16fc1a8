//! `finetune [MODEL]`: trains in the given role.

use super::invocation::Invocation;
use super::plan;
use crate::config::demo;
use crate::config::groups::{Options, Role};
use crate::config::refusal::Refusal;
use crate::config::{Typed, alias, yaml};
use crate::run::coordinator;
use crate::run::folder::{self, RUN_FILE};
use crate::run::single;
use crate::run::worker;
use crate::support::stderr::say;
use crate::support::waiting;
use std::path::{Path, PathBuf};

/// Trains.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let settings = &mut inv.settings;
    let options = Options::of(settings)?;
    if options.output.quiet {
        waiting::silence();
    } else {
        settings.notes.iter().for_each(|note| say!("{}", plan::note_line(note)));
    }
    match options.cluster.role {
        Role::Coordinator => coordinator::run(settings, &options),
        Role::Worker => worker::run(settings, &options),
        Role::Single => single::run(settings, &options),
    }
}

/// Layers with lower priority than flags, file and environment: run.yaml of the resumed run; else, where neither a
/// model nor rows were named, the demonstration's settings.
pub fn more_layers(layers: &[Vec<Typed>]) -> Result<Vec<Vec<Typed>>, Refusal> {
    let find = |names: &[&str]| {
        let is = |t: &&Typed| names.contains(&alias::ours(&t.key).unwrap_or(&t.key));
        layers.iter().find_map(|l| l.iter().find(is)).map(|t| t.values.concat())
    };
    if find(&["role"]).as_deref() == Some("worker") {
        // A worker has no run of its own, and these values would count as typed against the coordinator's.
        return Ok(Vec::new());
    }
    let model = find(&["model"]);
    let run = match find(&["resume"]).as_deref() {
        None | Some("false") => None,
        Some("" | "true") => find(&["output"])
            .map(PathBuf::from)
            .or_else(|| folder::newest(model.as_deref().unwrap_or(demo::NAME))),
        Some(dir) => Some(folder::run_of(Path::new(dir))),
    };
    let mut more = Vec::new();
    if let Some(dir) = run.filter(|dir| dir.join(RUN_FILE).exists()) {
        let mut typed = yaml::read(&dir.join(RUN_FILE))?;
        // A run continues in its current folder. In another folder the log of the first run is not continued.
        let elsewhere = find(&["output"]).is_some_and(|to| !folder::same(Path::new(&to), &dir));
        // Printed events are for the program that asked for them.
        let is_left = |t: &Typed| t.key == "log_json" && (elsewhere || t.values.concat() == "-");
        typed.retain(|t| t.key != "output" && !is_left(t));
        more.push(typed);
    } else if model.as_deref().is_none_or(|m| m == demo::NAME) && find(&["data"]).is_none() {
        more.push(demo::settings()?);
    }
    Ok(more)
}
