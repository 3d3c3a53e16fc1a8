//! `--role worker`: computes for a coordinator. A worker needs an address and a token; the coordinator sends the run's
//! configuration, its rows and, unless this machine has it, the base model. Training options that are typed here are
//! compared with the run's and not used.

use super::base_model;
use super::signals;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Cache, Ending, ModelSource, Reconnect, Sight, Way, Worker};
use crate::config::cache;
use crate::config::groups::{Coordinator, Options};
use crate::config::refusal::{Kind, Refusal};
use crate::config::table::{Section, TABLE};
use crate::config::{Origin, Settings};
use crate::devices;
use crate::net::{Party, Wishes, await_token, secure};
use crate::report::{Look, Shift};
use crate::support::stderr::{inline, say};
use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

/// Pause between two looks for a token.
const GLANCE: Duration = Duration::from_millis(200);

/// Options of other sections that also belong to the run, so the coordinator decides them.
const OF_THE_RUN: [&str; 6] =
    ["chat-template", "eval-steps", "save-steps", "save-total-limit", "sample-prompt", "sample-rows"];

/// Runs the worker.
pub fn run(settings: &Settings, options: &Options) -> Result<(), Refusal> {
    let cluster = &options.cluster;
    let inject = Inject::from_environment().map_err(Refusal::usage)?;
    let chosen = devices::choose(&options.devices)?;
    let at = match (&cluster.bind, &cluster.coordinator) {
        (Some(at), _) | (None, Some(Coordinator::At(at))) => Some(at),
        (None, Some(Coordinator::Auto) | None) => None,
    };
    let listens = cluster.bind.is_some();
    let wishes =
        Wishes { token_file: cluster.token_file.as_deref(), insecure: cluster.insecure, at, listens };
    if cluster.engine {
        wait_for_token(&wishes, cluster.join_timeout)?;
    }
    let secured = secure(Party::Worker, &wishes)?;
    let look = if options.output.quiet { Look::Quiet } else { Look::detect() };
    let shift = RefCell::new(Shift::new(look));
    let say = |line: &str| shift.borrow().line(&inline(line));
    let see = |sight: Sight<'_>| match sight {
        Sight::Share(share) => shift.borrow_mut().see(share),
        Sight::Over(why) => shift.borrow_mut().over(why),
    };
    secured.notes.iter().for_each(|note| say(note));
    chosen.notes.iter().for_each(|note| say(note));
    let named = named(settings, options)?;
    let model = named.as_ref().map(|(_, hash)| hash.clone());
    let source = ModelSource::Files { named, cache: Cache::new(cache(options)?) };
    let mut worker = Worker::new(devices::equipment(&chosen, inject), source, &say).shown_to(&see);
    signals::listen(Look::Quiet).map_err(|e| Refusal::failure(format!("signals: {e}")))?;
    let reconnect = Reconnect {
        way: match at {
            Some(_) if listens => Way::Listen(secured.at),
            Some(_) => Way::Dial(secured.at),
            None => Way::Find,
        },
        security: secured.security,
        patience: cluster.join_timeout,
        stays: cluster.stay,
        model,
        // Tasks of an engine have the command line of task 0, which replaces words such as `auto`.
        options: if cluster.engine { Vec::new() } else { typed(settings) },
        stop: &signals::STOP,
        say: &say,
    };
    match reconnect.run(&mut worker) {
        // An engine does not start a task with code 0 again, nor Kubernetes a pod with an index, whatever gave it its role.
        Ending::Stopped if cluster.engine || std::env::var_os("JOB_COMPLETION_INDEX").is_some() => {
            Err(Refusal::of(Kind::Saved, "stopped by a signal"))
        }
        Ending::Complete | Ending::Stopped => Ok(()),
        Ending::Halted(line) => Err(Refusal::of(Kind::NonFinite, line)),
        Ending::Refused(line) => Err(Refusal::configuration(line)),
        Ending::Failed(line) => Err(Refusal::failure(line)),
        Ending::Alone(e) => Err(e.into()),
    }
}

/// Waits for a token that the coordinator makes in the home folder of all tasks, and says so once.
fn wait_for_token(wishes: &Wishes, patience: Duration) -> Result<(), Refusal> {
    let mut said = false;
    let mut wait = |line: &str| {
        if !std::mem::replace(&mut said, true) {
            say!("{line}; waits for that of task 0, which is seen here if both have one home folder");
        }
        std::thread::sleep(GLANCE);
    };
    Ok(await_token(wishes, patience, &mut wait)?)
}

/// The model named here, and its hash.
fn named(settings: &Settings, options: &Options) -> Result<Option<(PathBuf, String)>, Refusal> {
    if !settings.is_given("model") {
        return Ok(None);
    }
    let opened = base_model::open(&options.model.model)?;
    let hash = base_model::hash(&opened.path)?;
    Ok(Some((opened.path, hash)))
}

/// Folder of the models received from coordinators.
fn cache(options: &Options) -> Result<PathBuf, Refusal> {
    let own = || cache::folder().map(|dir| dir.join("models"));
    let dir = options.cluster.model_cache.clone().or_else(own);
    dir.ok_or_else(|| {
        Refusal::configuration("no folder for the base model: no home folder; give --model-cache DIR")
    })
}

/// The typed options that the coordinator decides.
fn typed(settings: &Settings) -> Vec<(String, String)> {
    let of_the_run = |section| matches!(section, Section::Data | Section::Lora | Section::Optim);
    let options = TABLE.iter().filter(|o| of_the_run(o.section) || OF_THE_RUN.contains(&o.name));
    let said = options.filter_map(|o| {
        let setting = settings.get(o.name).filter(|s| s.source != Origin::Default)?;
        Some((o.key(), setting.values.join(",")))
    });
    said.collect()
}
