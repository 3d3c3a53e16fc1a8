//! `finetune doctor [FILE]`: checks whether this machine meets the requirements of a run. Requirements are in a file
//! (`recipes/gpu-training.yaml`, embedded in the binary) and are compared with the system's values. Every verdict
//! except `ok` has the command that fixes it. (No existing verb checks more than the devices.)

mod probe;
mod requirement;
mod system;

use crate::cli::invocation::Invocation;
use crate::config::Origin;
use crate::config::refusal::Refusal;
use probe::{Probe, Seen};
use requirement::Requirement;
use serde::Serialize;
use std::path::Path;

/// Verdict on a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Not met, but not required.
    Warning,
    /// Not met, and required.
    Failed,
    /// There was nothing to check.
    Skipped,
}

/// One line of the result.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Finding {
    check: requirement::Check,
    required: bool,
    verdict: Verdict,
    found: String,
    /// Purpose of the check.
    needs: String,
    /// The fix; `None` where nothing is missing.
    fix: Option<String>,
}

/// Checks all requirements.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let requirements = match inv.positional.first() {
        Some(file) => requirement::read(Path::new(file))?,
        None => requirement::embedded()?,
    };
    let probe = probe(inv)?;
    let findings: Vec<Finding> = requirements.iter().map(|r| judge(r, probe.look(r))).collect();
    tell(inv, &findings)?;
    let missing: Vec<String> =
        findings.iter().filter(|f| f.verdict == Verdict::Failed).map(|f| f.check.to_string()).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Refusal::failure(format!(
            "requirements that are not met: {} of {} ({}): the lines above say how to fix them",
            missing.len(),
            findings.len(),
            missing.join(", ")
        ))),
    }
}

fn probe(inv: &Invocation) -> Result<Probe, Refusal> {
    let s = &inv.settings;
    let coordinator = s.text("coordinator")?.filter(|at| *at != "auto").map(String::from);
    let output = s.get("output").filter(|o| o.source != Origin::Default).and_then(|o| o.values.first());
    Ok(Probe {
        coordinator,
        token_file: s.text("token-file")?.map(Into::into),
        model_cache: s.text("model-cache")?.map(Into::into),
        output: output.map_or_else(|| ".".into(), Into::into),
    })
}

fn judge(requirement: &Requirement, seen: Seen) -> Finding {
    let r = requirement;
    let (verdict, found, fix) = match seen {
        Seen::Good(found) => (Verdict::Ok, found, None),
        Seen::Nothing(why) => (Verdict::Skipped, why, None),
        Seen::Unknown(why) => (Verdict::Warning, why, Some(r.fix())),
        Seen::Bad { found, fix } => {
            let verdict = if r.required { Verdict::Failed } else { Verdict::Warning };
            (verdict, found, Some(fix.unwrap_or_else(|| r.fix())))
        }
    };
    Finding { check: r.check, required: r.required, verdict, found, needs: r.about.clone(), fix }
}

fn tell(inv: &mut Invocation, findings: &[Finding]) -> Result<(), Refusal> {
    if inv.json {
        let met = findings.iter().all(|f| f.verdict != Verdict::Failed);
        return inv.say(&serde_json::json!({ "met": met, "checks": findings }).to_string());
    }
    for f in findings {
        let word = match f.verdict {
            Verdict::Ok => "ok",
            Verdict::Warning => "warning",
            Verdict::Failed => "failed",
            Verdict::Skipped => "skipped",
        };
        inv.say(&format!("{word:<8} {:<12} {}", f.check.to_string(), f.found))?;
        if let Some(fix) = &f.fix {
            inv.say(&format!("         needs        {}", f.needs))?;
            inv.say(&format!("         fix          {fix}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdict and the fix of a requirement.
    fn check(required: &str, seen: Seen, want: Verdict, fix: Option<&str>) {
        let text = format!("- {{check: disk, about: room, required: {required}, fix: general}}");
        let requirements = requirement::parse(&text, Path::new("r.yaml")).unwrap();
        let finding = judge(&requirements[0], seen);
        assert_eq!((finding.verdict, finding.fix.as_deref()), (want, fix));
    }

    #[test]
    fn verdict_follows_the_finding_and_names_a_fix() {
        let bad = |fix: Option<&str>| Seen::Bad { found: "3 GB".into(), fix: fix.map(String::from) };
        check("true", Seen::Good("30 GB".into()), Verdict::Ok, None);
        check("true", bad(None), Verdict::Failed, Some("general"));
        check("true", bad(Some("special")), Verdict::Failed, Some("special"));
        check("false", bad(None), Verdict::Warning, Some("general"));
        check("true", Seen::Unknown("no df".into()), Verdict::Warning, Some("general"));
        check("true", Seen::Nothing("not named".into()), Verdict::Skipped, None);
    }
}
