//! The loss on preferences: `--task`, `--loss` and their settings.

use super::dialects::KTO;
use super::refusal::Refusal;
use super::settings::Settings;
use super::values::real;
use crate::model::preference::{Loss, Objective};

/// Options that a task without preferences does not take.
const SETTINGS: [&str; 6] =
    ["loss", "beta", "label-smoothing", "simpo-gamma", "nll-weight", "reference-adapter"];

/// Losses by task and name.
const LOSSES: [(&str, &str, Loss); 13] = [
    ("dpo", "sigmoid", Loss::Sigmoid),
    ("dpo", "hinge", Loss::Hinge),
    ("dpo", "ipo", Loss::Ipo),
    ("dpo", "robust", Loss::Robust),
    ("dpo", "apo_zero", Loss::ApoZero),
    ("dpo", "apo_down", Loss::ApoDown),
    ("dpo", "apo_zero_unpaired", Loss::ApoZeroUnpaired),
    ("ipo", "ipo", Loss::Ipo),
    ("orpo", "orpo", Loss::Orpo),
    ("simpo", "simpo", Loss::SimPo),
    ("cpo", "sigmoid", Loss::Cpo),
    ("cpo", "hinge", Loss::CpoHinge),
    ("cpo", "ipo", Loss::CpoIpo),
];

/// The objective of a task; `None` if it has no preferences.
pub(super) fn objective(s: &Settings, task: &str) -> Result<Option<Objective>, Refusal> {
    let losses: Vec<_> = LOSSES.iter().filter(|(of, ..)| *of == task).collect();
    let Some((_, default, _)) = losses.first() else {
        return match SETTINGS.iter().find(|name| s.is_given(name)) {
            Some(name) => Err(s.refuse(name, "goes with --task dpo, orpo, cpo or simpo")),
            None => Ok(None),
        };
    };
    let name = s.text("loss")?.unwrap_or(default);
    if name.starts_with("kto") {
        return Err(s.refuse("loss", KTO));
    }
    let Some((.., loss)) = losses.iter().find(|(_, known, _)| *known == name) else {
        let known: Vec<&str> = losses.iter().map(|(_, known, _)| *known).collect();
        return Err(s.refuse("loss", format!("{name:?} is no loss of --task {task}: {}", known.join(", "))));
    };
    let loss = *loss;
    let beta = real(s, "beta", |v| v.is_finite() && v > 0.0, "must be finite and above 0")?.unwrap_or(0.1);
    if matches!(loss, Loss::Ipo | Loss::CpoIpo) && beta < 0.005 {
        return Err(
            s.refuse("beta", "is below 0.005: the loss of a pair begins at 1 / (4 beta^2), above 10,000")
        );
    }
    let smoothing =
        real(s, "label-smoothing", |v| (0.0..0.5).contains(&v), "must be at least 0 and below 0.5")?;
    let smoothing = smoothing.unwrap_or(0.0);
    if smoothing > 0.0 && !loss.smooths() {
        return Err(s.refuse("label-smoothing", "goes with --loss robust, --task cpo or --task simpo"));
    }
    let finite = |v: f64| v.is_finite() && v >= 0.0;
    if s.is_given("simpo-gamma") && loss != Loss::SimPo {
        return Err(s.refuse("simpo-gamma", "goes with --task simpo"));
    }
    let gamma = real(s, "simpo-gamma", finite, "must be finite and at least 0")?.unwrap_or(0.5);
    let nll = match real(s, "nll-weight", finite, "must be finite and at least 0")? {
        Some(_) if loss == Loss::Orpo => {
            return Err(
                s.refuse("nll-weight", "orpo adds the loss of whole chosen rows with weight 1: set --beta")
            );
        }
        Some(_) if loss == Loss::ApoZeroUnpaired => {
            return Err(s.refuse("nll-weight", "goes with pairs of answers"));
        }
        Some(weight) => weight,
        None if matches!(loss, Loss::Orpo | Loss::Cpo | Loss::CpoHinge | Loss::CpoIpo) => 1.0,
        None => 0.0,
    };
    if s.is_given("reference-adapter") && !loss.has_reference() {
        return Err(s.refuse("reference-adapter", format!("{} has no reference: leave it out", loss.name())));
    }
    Ok(Some(Objective { loss, beta, smoothing, gamma, nll }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Origin, Typed, table::TABLE};

    /// Checks flags: a part of the refusal, or the loss.
    fn check(flags: &[(&str, &str)], want: Result<(Loss, f64), &str>) {
        let typed = |(name, value): &(&str, &str)| Typed {
            key: name.replace('-', "_"),
            values: vec![(*value).into()],
            source: Origin::Flag,
        };
        let options: Vec<_> = TABLE.iter().collect();
        let settings = Settings::resolve(&options, vec![flags.iter().map(typed).collect()]).unwrap();
        let got = objective(&settings, settings.text("task").unwrap().unwrap());
        match (got, want) {
            (Ok(Some(got)), Ok(want)) => assert_eq!((got.loss, got.nll), want, "{flags:?}"),
            (Err(got), Err(part)) => assert!(got.line.contains(part), "{flags:?}: {}", got.line),
            (got, want) => panic!("{flags:?}: {got:?}, not {want:?}"),
        }
    }

    #[test]
    fn losses_and_settings_of_each_task() {
        check(&[("task", "dpo")], Ok((Loss::Sigmoid, 0.0)));
        check(&[("task", "dpo"), ("loss", "apo_down")], Ok((Loss::ApoDown, 0.0)));
        check(&[("task", "ipo")], Ok((Loss::Ipo, 0.0)));
        check(&[("task", "orpo")], Ok((Loss::Orpo, 1.0)));
        check(&[("task", "simpo")], Ok((Loss::SimPo, 0.0)));
        check(&[("task", "cpo")], Ok((Loss::Cpo, 1.0)));
        check(&[("task", "cpo"), ("loss", "hinge"), ("nll-weight", "0")], Ok((Loss::CpoHinge, 0.0)));
        check(&[("task", "orpo"), ("loss", "sigmoid")], Err("no loss of --task orpo: orpo"));
        check(&[("task", "dpo"), ("loss", "kto_pair")], Err("KL estimate"));
        check(&[("task", "dpo"), ("label-smoothing", "0.1")], Err("--loss robust"));
        check(&[("task", "dpo"), ("loss", "robust"), ("label-smoothing", "0.5")], Err("below 0.5"));
        check(&[("task", "dpo"), ("simpo-gamma", "1")], Err("--task simpo"));
        check(&[("task", "dpo"), ("beta", "0")], Err("above 0"));
        check(&[("task", "ipo"), ("beta", "0.001")], Err("4 beta^2"));
        check(&[("task", "orpo"), ("nll-weight", "2")], Err("--beta"));
        check(&[("task", "cpo"), ("reference-adapter", "a")], Err("has no reference"));
        check(&[("task", "sft"), ("loss", "ipo")], Err("--task dpo"));
    }
}
