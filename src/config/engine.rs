//! `--role auto`: the role of this process in a job that an engine has started, as a pure function of the variables that
//! engines set. The result is a layer of options below those that a user gave. What started the process itself counts
//! before what allocated the machine: mpirun in a Slurm job has its own ranks.

use super::alias;
use super::refusal::Refusal;
use super::typed::{Origin, Typed};
use crate::net::Endpoint;
use std::path::Path;

mod launch;
#[cfg(test)]
mod tests;

use launch::{Task, Variables};

/// Lists of visible cards. An engine sets the one of the cards' vendor.
const VISIBLE: [&str; 4] =
    ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"];

/// Options that a worker does not get from a command line for all tasks: the address on which rank 0 listens.
const OF_RANK_0: &str = "bind";

/// Replaces `role: auto` in `layers` by the role of this process, and adds the options that follow from it as the last
/// layer. Returns the line that says what was found, if the role was `auto`. The process may use `cores` cores.
pub fn expand(
    layers: &mut Vec<Vec<Typed>>,
    read: &dyn Fn(&str) -> Option<String>,
    cores: usize,
) -> Result<Option<String>, Refusal> {
    let is = |t: &Typed, name: &str| alias::ours(&t.key).unwrap_or(&t.key) == name;
    let given = |layers: &[Vec<Typed>], name: &str| {
        layers.iter().flatten().find(|t| is(t, name)).map(|t| t.values.concat())
    };
    if given(layers, "role").as_deref() != Some("auto") {
        return Ok(None);
    }
    let env = Variables(read);
    let found = Found {
        task: launch::task(&env).map_err(|why| Refusal::configuration(format!("--role auto: {why}")))?,
        coordinator: given(layers, "coordinator").filter(|at| at != "auto").and_then(|at| at.parse().ok()),
        bind: given(layers, OF_RANK_0).and_then(|at| at.parse().ok()),
    };
    let (line, options) = found.options(&env, cores)?;
    let works = options.contains(&("role", "worker".into()));
    for layer in layers.iter_mut() {
        layer.retain(|t| {
            let far = is(t, "model") && !Path::new(&t.values.concat()).exists();
            !is(t, "role") && !(works && (is(t, OF_RANK_0) || far))
        });
    }
    let typed = |(key, value): (&str, String)| Typed {
        key: key.into(),
        values: vec![value],
        source: Origin::Computed(format!("--role auto: {line}")),
    };
    layers.push(options.into_iter().map(typed).collect());
    Ok(Some(format!("--role auto: {line}")))
}

/// What was found, and the addresses that a user gave.
struct Found {
    task: Option<Task>,
    coordinator: Option<Endpoint>,
    bind: Option<Endpoint>,
}

type Options = Vec<(&'static str, String)>;

impl Found {
    /// The line for the user, and the options of this process.
    fn options(&self, env: &Variables, cores: usize) -> Result<(String, Options), Refusal> {
        let single = |line: String| Ok((line, vec![("role", "single".into())]));
        let Some(task) = &self.task else {
            return single("no engine has started this process: trains alone".into());
        };
        let (mut options, job) = (task.share(env, cores), &task.job);
        if task.count == Some(1) {
            let (line, role) = single(format!("{job}, one task: trains alone"))?;
            options.extend(role);
            return Ok((line, options));
        }
        let of = task.count.map(|count| format!(" of {count}")).unwrap_or_default();
        let place = format!("{job}, task {}{of}", task.rank);
        let typed = self.coordinator.as_ref().or(self.bind.as_ref());
        let port = self.bind.as_ref().or(typed).map_or(task.port, |at| at.port);
        if task.rank == 0 {
            let near = task.one_node && self.coordinator.as_ref().is_none_or(Endpoint::is_loopback);
            let bind = if near { Endpoint::loopback(port) } else { Endpoint::everywhere(port) };
            options.extend([("role", "coordinator".into()), ("bind", bind.to_string())]);
            options.extend(task.count.map(|count| ("expect_workers", format!("{count} tasks"))));
            let at = self.bind.clone().unwrap_or(bind);
            return Ok((format!("{place}: coordinates on {at} and computes"), options));
        }
        let host = match (&self.coordinator, &self.bind) {
            (Some(at), _) => Some(at.host.clone()),
            (None, Some(at)) if !at.host.is_empty() && !at.is_loopback() => Some(at.host.clone()),
            _ => task.host.clone(),
        };
        let Some(host) = host else {
            let why = format!("{place}: nothing names the machine of task 0: add --coordinator HOST:{port}");
            return Err(Refusal::configuration(format!("--role auto: {why}")));
        };
        let at = Endpoint { host, port: self.coordinator.as_ref().map_or(port, |at| at.port) };
        options.extend([("role", "worker".into()), ("coordinator", at.to_string())]);
        Ok((format!("{place}: works for {at}"), options))
    }
}

impl Task {
    /// The devices and threads of this task where several share a machine.
    fn share(&self, env: &Variables, cores: usize) -> Options {
        let (rank, of) = self.local;
        let mut options = vec![("gpus", "auto".to_string())];
        let threads = self.cpus.unwrap_or(cores / of).clamp(1, cores);
        // `--gpus k/n` would divide cores that are this task's own already.
        if threads < cores || of > 1 {
            options.push(("threads", threads.to_string()));
        }
        let list = VISIBLE.into_iter().find_map(|name| env.text(name));
        let list = list.filter(|list| !["-1", "NoDevFiles"].contains(&list.trim()));
        let visible = list.map(|list| list.split(',').count());
        // A list that is shorter than that of the machine is this task's own.
        let own = visible.is_some_and(|visible| visible < self.cards.unwrap_or(of));
        if of > 1 && !own {
            options[0].1 = format!("{}/{of}", rank + 1);
        }
        options
    }
}
