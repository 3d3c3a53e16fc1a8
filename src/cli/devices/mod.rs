//! `finetune devices`: lists the devices of this machine and, with `--check`, their correctness and speed. `finetune
//! selftest` makes the same check and can write a report for finding out why a card fails; `finetune env` prints that
//! report's facts.

mod report;

use crate::cli::invocation::Invocation;
use crate::cluster::inject::Inject;
use crate::config::refusal::Refusal;
use crate::devices::{self, Listed};
use crate::support::stderr::say;
use serde_json::json;
use std::path::Path;

/// Default path of the report.
const REPORT: &str = "selftest.json";

/// Lists the devices.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let mut found = devices::list();
    if inv.settings.switch("check")? {
        check(inv, &mut found)?;
    }
    tell(inv, &found)?;
    verdict(&found)
}

/// Checks the devices.
pub fn selftest(inv: &mut Invocation) -> Result<(), Refusal> {
    let mut found = devices::list();
    check(inv, &mut found)?;
    tell(inv, &found)?;
    if inv.settings.is_given("report") {
        let path = match inv.settings.text("report")? {
            None | Some("true") => REPORT,
            Some(path) => path,
        };
        report::write(Path::new(path), &found)?;
        say!(
            "{path}: attach it to an issue about this machine; of yours it has drivers' variables, with `~` for the home folder"
        );
    }
    verdict(&found)
}

/// Prints the facts that a report of an error needs, then the devices.
pub fn env(inv: &mut Invocation) -> Result<(), Refusal> {
    let found = devices::list();
    let facts = report::facts(&found);
    if inv.json {
        return inv.say(&facts.to_string());
    }
    for line in report::lines(&facts) {
        inv.say(&line)?;
    }
    tell(inv, &found)
}

fn check(inv: &Invocation, found: &mut [Listed]) -> Result<(), Refusal> {
    let inject = Inject::from_environment().map_err(Refusal::usage)?;
    let threads = crate::config::groups::whole(&inv.settings, "threads", 1)?;
    devices::check(found, threads.unwrap_or_else(devices::cores), &inject)
}

/// A failed device is a failure of the command, after all devices have been listed.
fn verdict(found: &[Listed]) -> Result<(), Refusal> {
    let failed =
        found.iter().filter_map(|d| Some(format!("{}: {}", d.name, d.check.as_ref()?.failed.as_ref()?)));
    match failed.collect::<Vec<_>>() {
        none if none.is_empty() => Ok(()),
        lines => Err(Refusal::failure(lines.join("; "))),
    }
}

fn tell(inv: &mut Invocation, found: &[Listed]) -> Result<(), Refusal> {
    let no_gpu = devices::no_gpu(found).map(|why| why.to_string());
    let no_cuda = devices::no_cuda();
    if inv.json {
        return inv.say(&json!({ "devices": found, "no_gpu": no_gpu, "no_cuda": no_cuda }).to_string());
    }
    for device in found {
        for line in lines(device) {
            inv.say(&line)?;
        }
    }
    if let Some(why) = no_cuda {
        inv.say(&format!("no GPU through cuda: {why}"))?;
    }
    no_gpu.map_or(Ok(()), |why| inv.say(&format!("no GPU: {why}")))
}

fn lines(d: &Listed) -> Vec<String> {
    let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let what = [Some(d.kind), d.api.as_deref(), d.driver.as_deref(), d.pci.as_deref()];
    let mut what: Vec<String> = what.into_iter().flatten().map(String::from).collect();
    what.extend(d.cores.map(|cores| format!("{cores} cores")));
    what.push(match (d.memory_free, d.memory_total) {
        (Some(free), Some(total)) => format!("{} of {} free", gb(free), gb(total)),
        (Some(free), None) => format!("{} free", gb(free)),
        (None, _) => "its driver does not say how much memory is free".into(),
    });
    let mut out = vec![format!("{:<8}{}", d.name, d.model), format!("        {}", what.join(", "))];
    if !d.features.is_empty() {
        out.push(format!("        {}", d.features.join(", ")));
    }
    out.push(match (&d.class, &d.error) {
        (Some(class), _) => format!("        class {class}"),
        (None, Some(error)) => format!("        cannot be opened: {error}"),
        (None, None) => "        not opened".into(),
    });
    if d.kind == "software" {
        out.push("        slower than the CPU backend: used only if --gpus names it".into());
    }
    let Some(check) = &d.check else { return out };
    out.push(match (&check.failed, &check.deviation) {
        (Some(failed), _) => format!("        self-test FAILED: {failed}"),
        (None, Some(d)) => format!(
            "        self-test passed: loss off by {:.1e}, gradient by {:.1e} ({:.0e} is allowed), in {:.2} s",
            d.loss, d.gradient, d.bound, check.seconds
        ),
        (None, None) => "        self-test passed".into(),
    });
    if let Some(speed) = check.speed {
        out.push(format!("        {:.1} GFLOP/s in a linear layer of {1} x {1}", speed.gflops, speed.size));
    }
    out
}
