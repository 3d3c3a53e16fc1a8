//! Every recipe is complete: its head states command, cost and expected result, its options are known, and its rows
//! exist.

use finetune::config::groups::{Expect, Options, Role};
use finetune::config::refusal::Refusal;
use finetune::config::{Settings, table::TABLE, yaml};
use finetune::data::Task;
use std::path::{Path, PathBuf};

/// The requirements of a machine, not a configuration of a run.
const REQUIREMENTS: &str = "gpu-training";

fn recipes() -> Vec<(String, PathBuf)> {
    let folder = std::fs::read_dir(root().join("recipes")).unwrap().map(|e| e.unwrap().path());
    let yaml = folder.filter(|p| p.extension().is_some_and(|e| e == "yaml"));
    let mut all: Vec<_> = yaml.map(|p| (p.file_stem().unwrap().to_string_lossy().into_owned(), p)).collect();
    all.sort();
    assert!(all.len() >= 6, "{all:?}");
    all
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn options(path: &Path) -> Result<(Options, Vec<String>), Refusal> {
    let all: Vec<_> = TABLE.iter().collect();
    let settings = Settings::resolve(&all, vec![yaml::read(path)?])?;
    Ok((Options::of(&settings)?, settings.notes))
}

#[test]
fn every_recipe_states_command_cost_and_result() {
    for (name, path) in recipes() {
        let text = std::fs::read_to_string(&path).unwrap();
        let head: Vec<&str> = text.lines().take_while(|line| line.starts_with('#')).collect();
        for word in ["command", "cost", "expect"] {
            let line = head.iter().find(|line| line.starts_with(&format!("# {word:<9} ")));
            assert!(line.is_some_and(|line| line.len() > 15), "{name}: its head says no {word}");
        }
        let named = format!("recipes/{name}.yaml");
        assert!(
            head.iter().any(|line| line.contains("finetune") && line.contains(&named)),
            "{name}: command"
        );
    }
}

#[test]
fn every_recipe_uses_known_options_and_existing_rows() {
    for (name, path) in recipes().into_iter().filter(|(name, _)| name != REQUIREMENTS) {
        let (options, notes) = options(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(notes.is_empty(), "{name} uses names of other trainers: {notes:?}");
        let rows = options.data.data.iter().chain(options.data.eval_data.iter().flat_map(|(_, paths)| paths));
        for file in rows {
            assert!(root().join(file).is_file(), "{name}: {}", file.display());
        }
        assert_eq!(options.output.output, Some(Path::new("runs").join(&name)), "{name}");
        assert!(!options.data.eval_data.is_empty() || options.data.eval_split.is_some(), "{name}: no eval");
        match name.as_str() {
            "shell-classifier" => {
                assert_eq!((options.data.task, options.data.num_classes), (Task::Classify, Some(2)));
            }
            "two-machines" => assert_eq!(options.cluster.role, Role::Coordinator),
            _ => assert_eq!((options.data.task, options.cluster.role), (Task::Sft, Role::Single)),
        }
    }
}

/// Each line `args: [...]` of a manifest, with the variables of its container, gives valid options.
#[test]
fn manifests_of_kubernetes_have_valid_options() {
    use finetune::config::{flags, variables, verb::VERBS};
    let mut lines = 0;
    for entry in std::fs::read_dir(root().join("recipes/kubernetes")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let quoted =
            |line: &str| line.split_once("value: \"").map(|(_, v)| v.split('"').next().unwrap().to_string());
        for args in text.split("args: [").skip(1) {
            let (words, rest) = args.split_once(']').unwrap();
            let container = rest.split("containers:").next().unwrap();
            let words: Vec<String> = words.split(", ").map(String::from).collect();
            let accepts = VERBS[0].accepts();
            let flags::Parsed::Typed(_, mut typed) = flags::parse(&accepts, &words).unwrap() else {
                panic!("{words:?}")
            };
            let read = |name: &str| {
                container.lines().find(|line| line.contains(&format!("name: {name},"))).and_then(quoted)
            };
            // The role of a pod follows from its own variables.
            typed.iter_mut().filter(|t| t.values == ["auto"] && t.key == "role").for_each(|t| {
                t.values = vec!["coordinator".into()];
            });
            let layers = vec![typed, variables::environment(read)];
            let settings = Settings::resolve(&accepts.options, layers).unwrap();
            let cluster = Options::of(&settings).unwrap().cluster;
            // The Trainer sets a variable with the number of pods.
            let tasks = (!text.contains("kind: TrainJob")).then_some(Expect::Tasks(4));
            assert_eq!(cluster.expect_workers, tasks, "{words:?}");
            lines += 1;
        }
    }
    assert_eq!(lines, 3);
}

#[test]
fn worker_unit_can_access_a_gpu() {
    let unit = std::fs::read_to_string(root().join("recipes/finetune-worker.service")).unwrap();
    assert!(unit.lines().any(|line| line == "SupplementaryGroups=render video"));
}

/// systemd treats a comment after a value as a part of the value.
#[test]
fn unit_environment_has_comments_on_their_own_lines() {
    let unit = std::fs::read_to_string(root().join("recipes/finetune-worker.service")).unwrap();
    let example = unit.split("<<'END'\n").nth(1).unwrap().split("#   END\n").next().unwrap();
    let lines: Vec<&str> = example.lines().map(|line| line.strip_prefix("#   ").unwrap()).collect();
    let values = lines.iter().filter(|line| !line.starts_with("# "));
    let words = values.map(|line| line.split_once('=').unwrap());
    let names: Vec<&str> = words.clone().map(|(name, _)| name).collect();
    assert_eq!(names, ["COORDINATOR", "FINETUNE_TOKEN"]);
    assert!(words.into_iter().all(|(_, value)| !value.contains([' ', '#'])), "{lines:?}");
}
