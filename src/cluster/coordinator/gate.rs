//! Admission of workers: a pure answer to a worker's `Hello`. A refusal names the difference and the side that has
//! to change; a worker that may come later is asked to dial again.

use super::super::message::{Bye, Hello, Manifest, PROTOCOL};
use super::super::plain::plain;
use crate::numeric::REVISION;
use std::collections::BTreeMap;

/// The version of this build.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The run, and the options that a worker must agree with.
#[derive(Debug, Clone)]
pub struct Gate {
    /// The manifest for workers; its `name` is set for each worker.
    pub manifest: Manifest,
    /// The run's options as in run.yaml. A worker's options must be equal.
    pub options: BTreeMap<String, String>,
}

impl Gate {
    /// Admits a worker, or returns the `Bye` that says why not.
    pub fn judge(&self, hello: &Hello) -> Result<(), Bye> {
        self.protocol(hello)?;
        numerics(hello)?;
        self.model(hello)?;
        self.options(hello)?;
        self.epoch(hello)
    }

    fn protocol(&self, hello: &Hello) -> Result<(), Bye> {
        if hello.protocol == PROTOCOL {
            return Ok(());
        }
        let older = if hello.protocol < PROTOCOL { "the worker" } else { "the coordinator" };
        refused(format!(
            "the worker (finetune {}) speaks protocol {}, the coordinator (finetune {VERSION}) {PROTOCOL}: update {older}",
            plain(&hello.version),
            hello.protocol,
        ))
    }

    fn model(&self, hello: &Hello) -> Result<(), Bye> {
        match &hello.model {
            Some(hash) if *hash != self.manifest.model_hash => refused(format!(
                "the worker was given another model (hash {}) than the run's {} (hash {}): leave MODEL out there, or \
                 name the same one",
                short(hash),
                self.manifest.model,
                short(&self.manifest.model_hash),
            )),
            _ => Ok(()),
        }
    }

    fn options(&self, hello: &Hello) -> Result<(), Bye> {
        let differs =
            |(name, value): &&(String, String)| !self.options.get(name).is_some_and(|v| same(v, value));
        let Some((name, value)) = hello.options.iter().find(differs) else { return Ok(()) };
        let flag = plain(name).replace('_', "-");
        let here = self.options.get(name).map_or("unset", String::as_str);
        refused(format!(
            "the worker was given --{flag} {}, the run has {here}: leave --{flag} out there, the coordinator decides it",
            plain(value)
        ))
    }

    /// A worker that has met a later epoch of this run proves that this coordinator is outdated.
    fn epoch(&self, hello: &Hello) -> Result<(), Bye> {
        match &hello.before {
            Some((run, epoch)) if *run == self.manifest.run && *epoch > self.manifest.epoch => {
                let reason = format!(
                    "this coordinator is of epoch {}, and the run has gone on in epoch {epoch} elsewhere: end this one",
                    self.manifest.epoch
                );
                Err(Bye::Later { reason })
            }
            _ => Ok(()),
        }
    }
}

/// Builds whose kernels round differently would make the bits of a run depend on which worker computed what.
fn numerics(hello: &Hello) -> Result<(), Bye> {
    if hello.numerics == REVISION {
        return Ok(());
    }
    let older = if hello.numerics < REVISION { "the worker" } else { "the coordinator" };
    refused(format!(
        "the worker (finetune {}) computes with numerics revision {}, the coordinator (finetune {VERSION}) with \
         {REVISION}: update {older}",
        plain(&hello.version),
        hello.numerics,
    ))
}

/// The remark on an admitted worker of another release, if it is one.
pub(super) fn remark(hello: &Hello) -> Option<String> {
    let version = plain(&hello.version);
    (version != VERSION).then(|| {
        format!("it is finetune {version}, the coordinator finetune {VERSION}; numerics revision {REVISION} in both")
    })
}

/// Whether both are the same text, or the same number in another notation (2e-4, 0.0002).
fn same(ours: &str, theirs: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    ours == theirs || number(ours).is_some_and(|n| number(theirs) == Some(n))
}

fn refused(reason: String) -> Result<(), Bye> {
    Err(Bye::Refused { reason })
}

/// The beginning of a hash, for display.
fn short(hash: &str) -> String {
    plain(hash).chars().take(12).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::lora::LoraSpec;

    pub fn manifest() -> Manifest {
        let lora =
            LoraSpec { rank: 4, alpha: 8.0, targets: vec!["q_proj".into()], seed: 1, ..LoraSpec::none() };
        Manifest {
            run: "r".into(),
            epoch: 3,
            name: String::new(),
            model: "demo".into(),
            model_hash: "abcd".into(),
            files: vec![],
            parts: vec![],
            labels: None,
            tags: false,
            class_weights: None,
            quantize: None,
            vocabulary: 96,
            lora,
            parameters: 12,
            layout: [0; 32],
            tokens: 256,
            dtype: None,
            fraction_bits: 40,
            sum_bits: 0,
            moments: false,
            delay: 0,
            steps: 9,
            silence_millis: 0,
            seats: None,
        }
    }

    pub fn hello() -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: VERSION.into(),
            numerics: REVISION,
            identity: [7; 16],
            name: "host 1".into(),
            model: None,
            options: vec![],
            before: None,
        }
    }

    fn check(change: impl Fn(&mut Hello), part: &str) {
        let options = [("rank", "4"), ("learning_rate", "2e-4")].map(|(k, v)| (k.to_string(), v.to_string()));
        let options = BTreeMap::from(options);
        let gate = Gate { manifest: manifest(), options };
        let mut said = hello();
        change(&mut said);
        match gate.judge(&said) {
            Ok(()) => assert_eq!(part, "", "{said:?}"),
            Err(Bye::Refused { reason } | Bye::Later { reason }) => {
                assert!(!part.is_empty() && reason.contains(part), "{reason}");
                assert!(!reason.contains('\n') && !reason.contains('\x1b'), "{reason:?}");
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn other_release_with_the_same_numerics_gives_a_remark() {
        assert_eq!(remark(&hello()), None);
        let said = remark(&Hello { version: "9.9.9\n".into(), ..hello() }).unwrap();
        assert!(said.starts_with("it is finetune 9.9.9\\n, the coordinator finetune "), "{said}");
    }

    #[test]
    fn hello_decides_who_is_admitted() {
        check(|_| {}, "");
        check(|h| h.protocol = PROTOCOL + 1, "update the coordinator");
        check(|h| (h.protocol, h.version) = (0, "0.0.1\x1b[2J\n".into()), "update the worker");
        check(|h| (h.numerics, h.version) = (REVISION + 1, "9.9.9".into()), "update the coordinator");
        let both = format!(
            "the worker (finetune 0.0.1) computes with numerics revision 0, the coordinator (finetune {VERSION}) with {REVISION}: update the worker"
        );
        check(|h| (h.numerics, h.version) = (0, "0.0.1".into()), &both);
        check(|h| h.version = "9.9.9".into(), "");
        check(|h| h.model = Some("abcd".into()), "");
        check(|h| h.model = Some("ffff".into()), "hash ffff");
        check(|h| h.options = vec![("rank".into(), "4".into())], "");
        check(|h| h.options = vec![("learning_rate".into(), "0.0002".into())], "");
        check(|h| h.options = vec![("rank".into(), "8".into())], "--rank 8, the run has 4");
        check(|h| h.options = vec![("max_steps".into(), "8".into())], "--max-steps 8, the run has unset");
        check(|h| h.before = Some(("r".into(), 3)), "");
        check(|h| h.before = Some(("another".into(), 9)), "");
        check(|h| h.before = Some(("r".into(), 4)), "epoch 4 elsewhere");
    }
}
