//! A worker against a scripted coordinator: the whole protocol, with real models on real threads, and every fault that
//! can be injected.

mod chains;
mod document;
#[path = "../every_message/mod.rs"]
mod every_message;
mod files;
mod hostile;
mod life;
mod patience;
mod process;
mod script;

use finetune::backend::Cpu;
use finetune::cluster::digest;
use finetune::cluster::message::{Bye, LeaseId, ToCoordinator, ToWorker, Trouble, Work};
use finetune::cluster::sum_chunk;
use finetune::cluster::worker::{ModelSource, Outcome};
use finetune::model::memory;
use finetune::model::stage::{Sampling, Targets};
use finetune::train::stop::{Stop, Urgency};
use script::*;
use std::time::{Duration, Instant};

#[test]
fn granted_leases_add_up_on_any_number_of_devices() {
    let all: Vec<u32> = (0..MICROBATCHES).collect();
    for devices in [1, 2, 3] {
        let outcome = with(equipment(devices, ""), |script| {
            script.welcome(manifest());
            let hash = script.parameters();
            script.train(&all);
            let announced = script.announced(all.len(), hash);
            // Two are denied, and one is granted only after the flush was requested.
            let (mine, last) = (&announced[2..], announced[7]);
            announced[..2].iter().for_each(|&lease| script.say(ToWorker::Deny { lease }));
            mine[..5].iter().for_each(|&lease| script.say(ToWorker::Grant { lease }));
            script.say(ToWorker::Flush { step: 1, relays: None });
            script.say(ToWorker::Grant { lease: last });
            let (sum, leases, sums) = script.sum();
            assert_eq!((sum, leases.as_slice()), (1, mine));
            let which: Vec<u32> = mine.iter().map(|&l| l as u32).collect();
            assert!(sums == expected(&which), "{devices} devices: the exact sum of what was granted");
            // Requested again before it was taken: the same sum again.
            script.say(ToWorker::Flush { step: 1, relays: None });
            assert!(script.sum() == (1, mine.to_vec(), sums));
            script.say(ToWorker::SumTaken { sum: 1 });
            // A sum of one microbatch, in f32.
            script.train(&[0]);
            let lease = script.announced(1, hash)[0];
            script.say(ToWorker::Grant { lease });
            script.say(ToWorker::Flush { step: 1, relays: None });
            assert!(script.sum() == (2, vec![0], expected(&[0])));
            done(script);
        });
        assert_eq!(outcome, Outcome::Done);
    }
}

#[test]
fn a_wanted_gradient_comes_alone_and_a_check_has_its_digest() {
    let outcome = with(equipment(2, ""), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.train(&[0, 1]);
        let announced = script.announced(2, hash);
        // The other one still waits for its answer.
        for (number, &lease) in (1..).zip(announced.iter().rev()) {
            script.say(ToWorker::Deliver { lease });
            script.say(ToWorker::Deliver { lease });
            assert!(script.sum() == (number, vec![lease], expected(&[lease as u32])));
        }
        script.say(ToWorker::SumTaken { sum: 1 });
        script.say(ToWorker::Flush { step: 1, relays: None });
        let (sum, leases, sums) = script.sum();
        assert_eq!((sum, leases.as_slice()), (2, &announced[..1]), "the sum that was not taken, again");
        script.lease(9, 0, Work::Verify(microbatch(announced[0] as u32)));
        let pieces = sum_chunk::of_sum(1, &sums).map(|piece| match piece {
            ToCoordinator::SumPiece { packed, .. } => packed,
            other => panic!("{other:?}"),
        });
        let len = sums.cells().iter().map(Vec::len).sum();
        let arrived = digest::of_pieces(&pieces.collect::<Vec<_>>(), len, i64::MAX, &sums.scalars()).unwrap();
        match script.hear() {
            ToCoordinator::Verified { lease: 9, digest, parameters, .. } => {
                assert_eq!((digest, parameters), (arrived, hash));
            }
            other => panic!("{other:?}"),
        }
        done(script);
    });
    assert_eq!(outcome, Outcome::Done);
}

#[test]
fn evaluation_and_prompts_are_leased_too() {
    with(equipment(1, ""), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.lease(5, 0, Work::Eval(microbatch(0)));
        match script.hear() {
            ToCoordinator::Score { lease: 5, sums, parameters, .. } => {
                assert!(sums.targets == 40 && sums.loss > 0.0 && parameters == hash);
            }
            other => panic!("{other:?}"),
        }
        let sampling = Sampling { max_new_tokens: 4, temperature: 0.0, top_p: 1.0, seed: 1, stop: vec![] };
        script.lease(6, 0, Work::Prompt { ids: vec![1, 2, 3], sampling });
        match script.hear() {
            ToCoordinator::Answer { lease: 6, ids, parameters } => {
                assert!(ids.len() == 4 && parameters == hash)
            }
            other => panic!("{other:?}"),
        }
        done(script);
    });
}

#[test]
fn cancelled_lease_stops_at_once_and_others_continue() {
    with(equipment(1, "slow=1000"), |script| {
        script.welcome(manifest());
        script.parameters();
        script.train(&[0, 1, 2]);
        std::thread::sleep(Duration::from_millis(200));
        script.say(ToWorker::Cancel { lease: 2 });
        assert_eq!(script.hear(), ToCoordinator::Stopped { lease: 2, micros: 0 });
        let began = Instant::now();
        script.say(ToWorker::Cancel { lease: 0 });
        match script.hear() {
            ToCoordinator::Stopped { lease: 0, micros } => assert!(micros > 10_000),
            other => panic!("{other:?}"),
        }
        assert!(began.elapsed() < Duration::from_millis(900));
        script.say(ToWorker::Cancel { lease: 1 });
        assert!(matches!(script.hear(), ToCoordinator::Stopped { lease: 1, .. }));
        done(script);
    });
}

/// A bad value is reported with its tensor, nothing falls back, and the same microbatch is fine the second time.
fn check_bad_value(inject: &str, tensor: &str, test: impl Fn(f64) -> bool) {
    with(equipment(1, inject), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.train(&[3]);
        match script.hear() {
            ToCoordinator::Fault { lease: 3, fault: Trouble::Value { tensor: named, value } } => {
                assert!(named.contains(tensor) && test(value), "{named} {value}");
            }
            other => panic!("{other:?}"),
        }
        script.lease(9, 0, Work::Recheck(microbatch(3)));
        assert_eq!(script.announced(1, hash), [9]);
        script.say(ToWorker::Deny { lease: 9 });
        done(script);
    });
}

#[test]
fn bad_value_names_its_tensor_and_nothing_falls_back() {
    check_bad_value("nan@1", "layers.0.self_attn.q_proj.lora_A", f64::is_nan);
    check_bad_value("huge@1", "mlp.down_proj.lora_B", |v| v > 1e6 && v.is_finite());
}

#[test]
fn device_error_falls_back_and_repeats_the_work() {
    with(equipment(1, "error@1,slow=20"), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        // A first item of work, so that both microbatches are queued when the device fails.
        let sampling = Sampling { max_new_tokens: 64, temperature: 0.0, top_p: 1.0, seed: 1, stop: vec![] };
        script.lease(9, 0, Work::Prompt { ids: vec![1, 2, 3], sampling });
        script.train(&[0, 1]);
        assert!(matches!(script.hear(), ToCoordinator::Answer { lease: 9, .. }));
        let device = |message: &ToCoordinator| matches!(message, ToCoordinator::Fault { lease: 0, fault: Trouble::Device { reason } } if reason.contains("injected"));
        assert!(device(&script.hear()));
        assert_eq!(script.hear(), ToCoordinator::Stopped { lease: 1, micros: 0 });
        match script.hear() {
            ToCoordinator::Fallback { device: 0, now, reason } => {
                assert!(now.name == "cpu 0" && reason.contains("injected"), "{now:?} {reason}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(script.hear(), ToCoordinator::Ask { device: 0, room: ROOM, together: 1 });
        script.train(&[0, 1]);
        let leases = script.announced(2, hash);
        leases.iter().for_each(|&lease| script.say(ToWorker::Grant { lease }));
        script.say(ToWorker::Flush { step: 1, relays: None });
        assert!(script.sum().2 == expected(&[0, 1]));
        done(script);
    });
}

#[test]
fn error_at_start_takes_the_next_backend_or_ends_the_worker() {
    with(equipment(1, "error@0"), |script| {
        script.welcome(manifest());
        assert_eq!(script.devices.len(), 1);
        done(script);
    });
    let outcome = with(equipment(1, "error@1,error@1"), |script| {
        script.welcome(manifest());
        script.parameters();
        script.train(&[0]);
        assert!(matches!(script.hear(), ToCoordinator::Fault { .. }));
        assert!(matches!(script.hear(), ToCoordinator::Fallback { .. }));
        assert!(matches!(script.hear(), ToCoordinator::Ask { .. }));
        script.train(&[0]);
        assert!(matches!(script.hear(), ToCoordinator::Fault { .. }));
        assert!(matches!(script.hear(), ToCoordinator::Leave { .. }));
    });
    assert!(matches!(outcome, Outcome::Failed { .. }));
}

/// A device with a chain of two backends loses both.
fn lose_both_backends(script: &mut Script) {
    script.welcome(manifest());
    script.parameters();
    script.lease(0, 0, Work::Train(microbatch(0)));
    assert!(matches!(script.hear(), ToCoordinator::Fault { .. }));
    assert!(matches!(script.hear(), ToCoordinator::Fallback { .. }));
    assert!(matches!(script.hear(), ToCoordinator::Ask { .. }));
    script.lease(1, 0, Work::Train(microbatch(0)));
    assert!(matches!(script.hear(), ToCoordinator::Fault { .. }));
    // The device does not report that it is down; leases come back.
    std::thread::sleep(Duration::from_millis(200));
}

#[test]
fn failed_device_stays_out_of_the_next_connection() {
    let comes_back = |script: &mut Script| {
        script.welcome(manifest());
        assert_eq!(script.devices.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["cpu 1"]);
        assert!(script.refused[0].contains("cpu 0") && script.refused[0].contains("injected"));
        let hash = script.parameters();
        script.train(&[0, 1]);
        script.announced(2, hash);
        done(script);
    };
    let (first, second) = twice(equipment(2, "error@1,error@1"), lose_both_backends, comes_back);
    assert!(matches!(first, Outcome::Lost { .. }) && second == Outcome::Done, "{first:?} {second:?}");

    // The only device: it failed while no coordinator was connected, or just before.
    let silent = |script: &mut Script| assert_eq!(script.link.from.blocking_recv(), None);
    let (_, second) = twice(equipment(1, "error@1,error@1"), lose_both_backends, silent);
    assert!(matches!(&second, Outcome::Failed { reason } if reason.contains("injected")), "{second:?}");
}

#[test]
fn late_device_gets_no_work_before_it_finishes() {
    with(equipment(1, "slow=400"), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.train(&[0]);
        std::thread::sleep(Duration::from_millis(200));
        script.say_parameters();
        script.lease(1, 0, Work::Train(microbatch(1)));
        assert_eq!(script.hear(), ToCoordinator::Stopped { lease: 1, micros: 0 }, "and it did not ask");
        assert_eq!(script.announced(1, hash), [0]);
        assert_eq!(script.hear(), ToCoordinator::Ask { device: 0, room: ROOM, together: 1 });
        script.lease(2, 0, Work::Train(microbatch(1)));
        assert_eq!(script.announced(1, hash), [2]);
        done(script);
    });
}

#[test]
fn wrong_or_too_small_device_is_refused_by_name() {
    let refused = |equipment, part: &str| {
        let outcome = with(equipment, |script| {
            script.welcome(manifest());
            assert!(script.devices.is_empty() && script.refused[0].contains(part), "{:?}", script.refused);
            assert!(matches!(script.hear(), ToCoordinator::Leave { .. }));
        });
        assert!(matches!(outcome, Outcome::Refused { .. }), "{outcome:?}");
    };
    refused(equipment(1, "selftest"), "cpu 0: computes wrong numbers");
    // Slightly less than the whole microbatch needs.
    let blueprint = blueprint();
    let at = |limit| memory::largest(load(&Cpu::new(1), &blueprint).unwrap(), limit);
    let limit = (0..).map(|i| 1_000_000 + i * 20_000).find(|&limit| at(limit) >= 20).unwrap();
    let most = at(limit);
    assert!((20..64).contains(&most));
    refused(limited(1, "", limit), "cpu 0: too small for microbatches of 64 tokens (needs ");
    let most = 1 << most.ilog2();
    refused(limited(1, "", limit), &format!("on the coordinator use --micro-batch-tokens {most} "));
    refused(limited(1, "", 1000), "the weights alone do not fit");
}

#[test]
fn damaged_parameters_show_in_the_hash() {
    with(equipment(1, "hash@1"), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.train(&[0]);
        match script.hear() {
            ToCoordinator::Announce { parameters, .. } => assert_ne!(parameters, hash),
            other => panic!("{other:?}"),
        }
        done(script);
    });
}

#[test]
fn parameters_with_a_wrong_hash_end_the_connection() {
    let outcome = with(equipment(1, ""), |script| {
        script.welcome(manifest());
        let flat = parameters();
        let bytes = flat.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        script.say(ToWorker::ParametersPiece { step: 0, offset: 0, bytes: bytes.into() });
        script.say(ToWorker::Parameters { step: 0, hash: [7; 32] });
        // Its own measurements may arrive; nothing else does.
        let mut said = std::iter::from_fn(|| script.link.from.blocking_recv());
        assert_eq!(said.find(|message| !matches!(message, ToCoordinator::Measured { .. })), None);
    });
    assert!(matches!(&outcome, Outcome::Lost { reason } if reason.contains("did not arrive")), "{outcome:?}");
}

#[test]
fn empty_flush_is_not_remembered() {
    with(equipment(1, ""), |script| {
        script.welcome(manifest());
        let hash = script.parameters();
        script.say(ToWorker::Flush { step: 1, relays: None });
        script.train(&[0]);
        let lease = script.announced(1, hash)[0];
        script.say(ToWorker::Grant { lease });
        script.train(&[1]);
        assert_eq!(script.announced(1, hash), [1], "and no sum before it is asked for again");
        script.say(ToWorker::Deny { lease: 1 });
        script.say(ToWorker::Flush { step: 1, relays: None });
        assert!(script.sum() == (1, vec![0], expected(&[0])));
        done(script);
    });
}

#[test]
fn stopped_worker_returns_its_leases_and_leaves() {
    let stop = Stop::new();
    let outcome = from(equipment(2, "slow=1000"), ModelSource::Here(blueprint()), &stop, |script| {
        script.welcome(manifest());
        script.parameters();
        script.train(&[0, 1, 2, 3]);
        std::thread::sleep(Duration::from_millis(50));
        stop.ask(Urgency::Now);
        let began = Instant::now();
        let mut back: Vec<LeaseId> = Vec::new();
        loop {
            match script.hear() {
                ToCoordinator::Stopped { lease, .. } => back.push(lease),
                ToCoordinator::Leave { .. } => break,
                other => panic!("{other:?}"),
            }
        }
        back.sort();
        assert_eq!(back, [0, 1, 2, 3]);
        assert!(began.elapsed() < Duration::from_secs(2));
    });
    assert_eq!(outcome, Outcome::Left);
}

#[test]
fn every_bye_gives_its_outcome() {
    // Text from another machine stays on one line.
    let said = || "why\nnot\u{202e}".to_string();
    let heard = || "why\\nnot\\u{202e}".to_string();
    let endings = [
        (Bye::Done, Outcome::Done),
        (Bye::Later { reason: said() }, Outcome::Lost { reason: heard() }),
        (Bye::Halted { reason: said() }, Outcome::Halted { reason: heard() }),
        (Bye::Refused { reason: said() }, Outcome::Refused { reason: heard() }),
        (Bye::Out { reason: said(), again: true }, Outcome::Lost { reason: heard() }),
        (Bye::Out { reason: said(), again: false }, Outcome::Out { reason: heard() }),
    ];
    for (bye, expected) in endings {
        let outcome = with(equipment(1, ""), |script| {
            script.welcome(manifest());
            script.say(ToWorker::Bye(bye));
        });
        assert_eq!(outcome, expected);
    }
}

#[test]
fn a_lease_beyond_the_manifest_is_refused() {
    let outcome = with(equipment(1, ""), |script| {
        script.welcome(manifest());
        script.parameters();
        let mut long = microbatch(0);
        (long.ids, long.targets) = (vec![1; 65], Targets::Tokens(vec![1; 65]));
        long.bounds = vec![0, 15, 65];
        script.lease(1, 0, Work::Train(long));
        match script.hear() {
            ToCoordinator::Leave { reason } => assert!(reason.contains("65 tokens"), "{reason}"),
            other => panic!("{other:?}"),
        }
    });
    assert!(
        matches!(&outcome, Outcome::Refused { reason } if reason.contains("longest has 64")),
        "{outcome:?}"
    );
}

#[test]
fn another_shape_is_refused_on_both_sides() {
    let mut other = manifest();
    other.layout[0] ^= 1;
    let mut fraction = manifest();
    fraction.fraction_bits = 30;
    let mut rounded = manifest();
    rounded.sum_bits = 1 << 31;
    for (manifest, part) in [
        (other, "other LoRA shape"),
        (fraction, "30 binary places"),
        (rounded, "rounds gradients to 2147483648 bits"),
    ] {
        let outcome = with(equipment(1, ""), |script| {
            assert!(matches!(script.hear(), ToCoordinator::Hello(_)));
            script.say(ToWorker::Welcome(Box::new(manifest)));
            match script.hear() {
                ToCoordinator::Leave { reason } => assert!(reason.contains(part), "{reason}"),
                other => panic!("{other:?}"),
            }
        });
        assert!(matches!(outcome, Outcome::Refused { .. }));
    }
}
