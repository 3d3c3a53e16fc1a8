//! Chains of backends with failures other than an error.

use crate::script::*;
use finetune::cluster::message::{ToCoordinator, Trouble};
use finetune::cluster::worker::{Begin, Blueprint, Candidate, Equipment, Opener};
use finetune::model::stage::Model;
use finetune::model::weights::ModelError;
use std::sync::Arc;

/// A backend that never opens.
#[derive(Clone, Copy)]
enum Broken {
    /// Panics, like wgpu on fatal errors.
    Panics,
    TooSmall,
}

impl Opener for Broken {
    fn backend(&self) -> &str {
        "broken"
    }

    fn open(&self, _: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        match self {
            Broken::Panics => panic!("the card is gone"),
            Broken::TooSmall => {
                Err(ModelError::Memory { needed: 3_000_000, limit: 2_000_000, way_out: String::new() })
            }
        }
    }
}

fn cpu() -> Arc<dyn Opener> {
    Arc::new(OnCpu { name: "cpu", threads: 1, limit: u64::MAX })
}

fn one(chain: Vec<Arc<dyn Opener>>, inject: &str) -> Equipment {
    let candidates = vec![Candidate { name: "card 0".into(), chain, begin: Begin::Anywhere }];
    Equipment { candidates, reference: cpu(), inject: inject.parse().unwrap() }
}

#[test]
fn backend_that_panics_on_open_is_skipped() {
    with(one(vec![Arc::new(Broken::Panics), cpu()], ""), |script| {
        script.welcome(manifest());
        assert_eq!(script.devices.len(), 1, "{:?}", script.refused);
        done(script);
    });
    with(one(vec![Arc::new(Broken::Panics)], ""), |script| {
        script.welcome(manifest());
        assert!(
            script.devices.is_empty() && script.refused[0].contains("the card is gone"),
            "{:?}",
            script.refused
        );
    });
}

/// After a failure in a run the device uses the next backend of its chain that opens.
fn check_falls_to_the_last(chain: Vec<Arc<dyn Opener>>, inject: &str, said: &str) {
    with(one(chain, inject), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.train(&[0]);
        match script.hear() {
            ToCoordinator::Fault { lease: 0, fault: Trouble::Device { reason } } => {
                assert!(reason.contains(said), "{reason}")
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(script.hear(), ToCoordinator::Fallback { device: 0, .. }));
        assert_eq!(script.hear(), ToCoordinator::Ask { device: 0, room: ROOM, together: 1 });
        script.train(&[0]);
        assert_eq!(script.announced(1, hash), [0]);
        done(script);
    });
}

#[test]
fn backend_that_is_too_small_is_skipped_in_a_run() {
    check_falls_to_the_last(vec![cpu(), Arc::new(Broken::TooSmall), cpu()], "error@1", "injected");
}

#[test]
fn panic_ends_the_device_and_keeps_its_reason() {
    check_falls_to_the_last(vec![cpu(), Arc::new(Broken::Panics), cpu()], "panic@1", "an injected panic");
}
