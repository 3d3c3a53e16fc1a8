//! Transfer of the base model to a worker: whole, interrupted, damaged, and by two workers at once.

use super::script::*;
use finetune::cluster::message::{ToCoordinator, ToWorker};
use finetune::cluster::worker::{Cache, ModelSource, Outcome};
use finetune::train::stop::Stop;
use std::path::Path;

/// A worker with the cache `dir` joins and computes; returns the number of fetched bytes. Requests from a single byte
/// on are not counted: they measure the link.
fn fetched(dir: &Path) -> u64 {
    let source = ModelSource::Files { named: None, cache: Cache::new(dir.to_path_buf()) };
    let (mut bytes, mut measures) = (0, false);
    let outcome = from(equipment(1, ""), source, &Stop::new(), |script| {
        assert!(matches!(script.hear(), ToCoordinator::Hello(_)));
        script.say(ToWorker::Welcome(Box::new(manifest())));
        loop {
            match script.link.from.blocking_recv().unwrap() {
                ToCoordinator::Fetch { file, offset, len } => {
                    measures |= len == 1;
                    bytes += if measures { 0 } else { len };
                    let all = &files()[file as usize].1;
                    let part = all[offset as usize..(offset + len) as usize].to_vec();
                    for (i, piece) in part.chunks(1 << 20).enumerate() {
                        let offset = offset + (i << 20) as u64;
                        script.say(ToWorker::Piece { file, offset, bytes: piece.to_vec().into() });
                    }
                }
                ToCoordinator::Ready { devices, .. } => break script.devices = devices,
                other => panic!("{other:?}"),
            }
        }
        let hash = script.parameters();
        script.train(&[0]);
        assert_eq!(script.announced(1, hash), [0]);
        done(script);
    });
    assert_eq!(outcome, Outcome::Done);
    bytes
}

fn size() -> u64 {
    files().iter().map(|(file, _)| file.size).sum()
}

#[test]
fn model_is_fetched_once_and_damaged_files_again() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(fetched(dir.path()), size());
    assert_eq!(fetched(dir.path()), 0);
    let whole = dir.path().join(manifest().model_hash);
    // Only the damaged file is fetched again.
    let weights = whole.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    assert_eq!(fetched(dir.path()), bytes.len() as u64);
    // After a process died during the transfer, the next one continues at the same byte.
    let partial = dir.path().join(format!("{}.partial", manifest().model_hash));
    std::fs::rename(&whole, &partial).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(partial.join("model.safetensors")).unwrap();
    file.set_len(1000).unwrap();
    assert_eq!(fetched(dir.path()), bytes.len() as u64 - 1000);
    assert!(whole.is_dir() && !partial.exists());
}

#[test]
fn two_workers_of_one_machine_fetch_the_model_once() {
    let dir = tempfile::tempdir().unwrap();
    let total: u64 = std::thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| fetched(dir.path())));
        both.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(total, size());
}

#[test]
fn unsafe_file_names_and_other_models_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |source, change: &dyn Fn(&mut finetune::cluster::message::Manifest)| {
        let mut manifest = manifest();
        change(&mut manifest);
        let outcome = from(equipment(1, ""), source, &Stop::new(), |script| {
            assert!(matches!(script.hear(), ToCoordinator::Hello(_)));
            script.say(ToWorker::Welcome(Box::new(manifest)));
            assert!(matches!(script.hear(), ToCoordinator::Leave { .. }));
        });
        assert!(matches!(outcome, Outcome::Refused { .. }), "{outcome:?}");
    };
    for name in ["../x", "/etc/x", "", ".hidden", "a/b", "a\\b", "x\0"] {
        let cache = || ModelSource::Files { named: None, cache: Cache::new(dir.path().join("cache")) };
        refused(cache(), &|m| m.files[0].name = name.into());
        refused(cache(), &|m| m.model_hash = name.into());
    }
    assert!(!dir.path().join("cache").exists());
    let named = Some((model_dir(), "another".to_string()));
    refused(ModelSource::Files { named, cache: Cache::new(dir.path().into()) }, &|_| ());
}
