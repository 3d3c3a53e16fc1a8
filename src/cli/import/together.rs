//! Keys whose meaning needs another key: revisions, learning rates at the end, seeds, losses, mixtures, templates.

use super::{Dialect, Import, JINJA, is_empty, scalar, word};
use crate::format::looks_like_id;
use serde_json::{Map, Value};

/// Converts all of these keys.
pub fn take(import: &mut Import, dialect: Dialect, keys: &Map<String, Value>) {
    let all = Keys(keys);
    revision(import, &all);
    last_rate(import, dialect, &all);
    seed(import, &all);
    template(import, &all);
    special_tokens(import, &all);
    mixture(import, &all);
    if dialect == Dialect::Trl {
        losses(import, &all);
        variables(import, &all);
    } else {
        for key in ["loss_type", "loss_weights", "env"] {
            all.value(key).into_iter().for_each(|value| import.lose(key, value, "not known here"));
        }
    }
    if dialect == Dialect::LlamaFactory && all.said("stage").is_some_and(|stage| stage == "pt") {
        // LLaMA-Factory joins texts and cuts them into rows of one length.
        import.set_default("long_rows", "split", "stage: pt, which splits long texts");
    }
}

/// Whether LLaMA-Factory's loss on preferences is a task here: its stage is `dpo` for all of them.
pub fn names_its_task(keys: &Map<String, Value>) -> bool {
    let all = Keys(keys);
    all.said("stage").is_some_and(|stage| stage == "dpo")
        && all.said("pref_loss").is_some_and(|loss| ["orpo", "simpo"].contains(&&*loss))
}

/// The keys that say something.
struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !is_empty(value))
    }

    fn said(&self, key: &str) -> Option<String> {
        self.value(key).map(scalar)
    }
}

fn revision(import: &mut Import, keys: &Keys) {
    let found = ["model_revision", "revision_of_model"].into_iter().find_map(|k| Some((k, keys.value(k)?)));
    let Some((key, revision)) = found.filter(|(_, revision)| scalar(revision) != "main") else { return };
    let line = import.lines.iter_mut().find(|line| line.key == "model");
    match line.filter(|line| looks_like_id(line.value.trim_matches('"'))) {
        Some(line) => {
            line.value = word(&format!("{}@{}", line.value.trim_matches('"'), scalar(revision)));
            line.from += &format!(", {key}");
        }
        None => import.lose(key, revision, "a model of the Hub has revisions: owner/name@revision"),
    }
}

/// The lowest rate of a cosine or of `wsd`, as a number or as a share of the highest one.
fn last_rate(import: &mut Import, dialect: Dialect, keys: &Keys) {
    let falls = match import.value_of("lr_scheduler") {
        // The others' default is linear.
        None => dialect == Dialect::Axolotl,
        Some(name) => ["cosine", "wsd"].contains(&name),
    };
    let share = |import: &mut Import, key: &str, ratio: &Value| {
        let peak = import.value_of("learning_rate").and_then(|rate| rate.parse::<f64>().ok());
        match (peak, scalar(ratio).parse::<f64>()) {
            (Some(peak), Ok(ratio)) if falls => {
                // 12 digits: 0.1 of 2e-4 is 2e-5.
                let rate: f64 = format!("{:.11e}", peak * ratio).parse().unwrap_or(peak * ratio);
                import.set("min_lr", format!("{rate:e}"), format!("{key} {ratio} of learning_rate"));
            }
            _ => import.lose(key, ratio, "min_lr goes with a learning_rate, and lr_scheduler: cosine or wsd"),
        }
    };
    if let Some(ratio) = keys.value("cosine_min_lr_ratio") {
        share(import, "cosine_min_lr_ratio", ratio);
    }
    let Some(settings) = keys.value("lr_scheduler_kwargs") else { return };
    let Some(map) = settings.as_object() else {
        let why = "settings of schedules are warmup_steps, min_lr and decay_steps";
        return import.lose("lr_scheduler_kwargs", settings, why);
    };
    for (name, value) in map {
        let key = format!("lr_scheduler_kwargs: {name}");
        match name.as_str() {
            "min_lr_rate" => share(import, &key, value),
            "min_lr" if falls => import.set("min_lr", scalar(value), key),
            "num_decay_steps" if import.value_of("lr_scheduler") == Some("wsd") => {
                import.set("decay_steps", scalar(value), key);
            }
            _ => import.lose(&key, value, "settings of schedules are warmup_steps, min_lr and decay_steps"),
        }
    }
}

fn seed(import: &mut Import, keys: &Keys) {
    let Some(data) = keys.value("data_seed") else { return };
    match import.value_of("seed") {
        None => import.set("seed", scalar(data), "data_seed"),
        Some(seed) if seed == scalar(data) => {}
        Some(_) => import.lose("data_seed", data, "one seed fixes everything: seed"),
    }
}

/// A template in the configuration becomes a file; the path of a file stays.
fn template(import: &mut Import, keys: &Keys) {
    let Some(text) = keys.said(JINJA) else { return };
    if text.contains("{{") || text.contains("{%") {
        import.template = Some(text);
    } else {
        import.set("chat_template", word(&text), JINJA);
    }
}

/// Padding is never computed; other tokens are the model's own.
fn special_tokens(import: &mut Import, keys: &Keys) {
    let why = "tokens and their meaning are the model's own";
    match keys.value("special_tokens") {
        Some(Value::Object(map)) => {
            for (name, token) in map.iter().filter(|(name, token)| *name != "pad_token" && !is_empty(token)) {
                import.lose(&format!("special_tokens: {name}"), token, why);
            }
        }
        Some(other) => import.lose("special_tokens", other, why),
        None => {}
    }
}

/// LLaMA-Factory's probabilities of data sets are weights of a mixture.
fn mixture(import: &mut Import, keys: &Keys) {
    let Some(strategy) = keys.value("mix_strategy").filter(|s| *s != "concat") else { return };
    let weights: Vec<String> = keys
        .said("interleave_probs")
        .map(|all| all.split(',').map(|p| p.trim().to_owned()).collect())
        .unwrap_or_default();
    let line = import.lines.iter_mut().find(|line| line.key == "data");
    let files: Vec<String> = line.as_ref().map_or(Vec::new(), |line| {
        let list = line.value.trim_start_matches('[').trim_end_matches(']').split(", ");
        list.map(|file| file.trim_matches('"').to_owned()).collect()
    });
    match line.filter(|_| !weights.is_empty() && weights.len() == files.len()) {
        Some(line) => {
            let all: Vec<String> =
                files.iter().zip(&weights).map(|(file, weight)| word(&format!("{file}={weight}"))).collect();
            line.value = format!("[{}]", all.join(", "));
            line.from += ", interleave_probs";
            let why = "an epoch has as many rows as all sets together; none ends when one of them does";
            import.remarks.push(format!("mix_strategy: {}: {why}", scalar(strategy)));
        }
        None => {
            let why = "needs interleave_probs, one for each set: data: [a.jsonl=0.7, b.jsonl=0.3]";
            import.lose("mix_strategy", strategy, why);
        }
    }
}

/// TRL's reward trainer. PEFT has one type for reward models and classifiers.
fn rewards(import: &mut Import) {
    import.lines.retain(|line| line.key != "task" || !line.from.starts_with("lora_task_type"));
    import.set_default("task", "reward", "center_rewards_coefficient");
}

/// Losses of TRL's trainers, and the task that has them. TRL's command names the trainer, which its file does not.
fn losses(import: &mut Import, keys: &Keys) {
    let of_dpo = ["beta", "precompute_ref_log_probs", "f_divergence_type", "loss_weights", "label_smoothing"];
    let named = keys.said("loss_type");
    let names: Vec<&str> = named.iter().flat_map(|all| all.split(',')).map(str::trim).collect();
    let weights: Vec<f64> = keys
        .said("loss_weights")
        .map(|all| all.split(',').filter_map(|w| w.trim().parse().ok()).collect())
        .unwrap_or_default();
    let from = format!("loss_type: {}", names.join(","));
    let main = names.iter().copied().find(|name| *name != "sft");
    match main {
        None if keys.value("center_rewards_coefficient").is_some() => return rewards(import),
        None if keys.value("cpo_alpha").is_some() => {
            return import.set_default("task", "cpo", "cpo_alpha");
        }
        None => {
            let others = ["num_generations", "reward_funcs", "desirable_weight", "undesirable_weight"];
            let of_others = others.iter().any(|key| keys.value(key).is_some());
            let key = of_dpo.into_iter().find(|key| keys.value(key).is_some());
            if let Some(key) = key.filter(|_| !of_others) {
                import.set_default("task", "dpo", format!("{key}, which is of TRL's DPO"));
                if key == "beta" {
                    let why = "TRL's CPO and ORPO have it too, and their file does not name them: see task";
                    import.remarks.push(format!("beta: {why}"));
                }
            }
            return;
        }
        Some("nll") => return,
        Some(task @ ("orpo" | "simpo" | "ipo")) => import.set("task", task, &*from),
        Some(loss @ ("sigmoid" | "hinge" | "robust" | "apo_zero" | "apo_down" | "apo_zero_unpaired")) => {
            let task = if keys.value("cpo_alpha").is_some() { "cpo" } else { "dpo" };
            import.set("task", task, &*from);
            import.set("loss", loss, &*from);
        }
        Some(_) => {
            let value = keys.value("loss_type").cloned().unwrap_or_default();
            return import.lose("loss_type", &value, LOSSES);
        }
    }
    let weight = |name: &str| {
        let at = names.iter().position(|other| *other == name)?;
        Some(weights.get(at).copied().unwrap_or(1.0))
    };
    if let (Some(sft), Some(main)) = (weight("sft"), main.and_then(weight)) {
        import.set("nll_weight", format!("{}", sft / main), "loss_weights");
    }
    let others: Vec<&str> =
        names.iter().copied().filter(|name| Some(*name) != main && *name != "sft").collect();
    if !others.is_empty() {
        import.lose(
            "loss_type",
            &Value::from(others.join(",")),
            "one loss is trained, and that of the chosen answers",
        );
    }
}

const LOSSES: &str = "losses are those of dpo (sigmoid, hinge, ipo, robust, apo_zero, apo_down, apo_zero_unpaired), orpo, cpo and simpo";

/// Variables of the environment stand in front of the command.
fn variables(import: &mut Import, keys: &Keys) {
    let Some(value) = keys.value("env") else { return };
    match value.as_object() {
        Some(map) => {
            let quoted = |text: String| match text
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "_-./:,".contains(c))
            {
                true => text,
                false => format!("'{}'", text.replace('\'', "'\\''")),
            };
            import.variables.extend(map.iter().map(|(name, v)| format!("{name}={}", quoted(scalar(v)))));
        }
        None => import.lose("env", value, "set variables in the shell"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::convert;
    use super::super::tests::check;
    use super::*;
    use std::path::Path;

    const LLAMA_FACTORY: &str = "model_name_or_path: o/n\nstage: sft\nfinetuning_type: lora\n";
    const TRL: &str =
        "model_name_or_path: o/n\ndataset_name: a.csv\nuse_peft: true\nlora_target_modules: all-linear\n";
    const AXOLOTL: &str = "base_model: o/n\nsequence_len: 64\nlearning_rate: 0.0002\n";

    #[test]
    fn keys_that_need_others_are_carried_over() {
        check(
            &format!(
                "{AXOLOTL}revision_of_model: v2\ncosine_min_lr_ratio: 0.1\nadam_epsilon: 1e-6\n\
                      exact_deduplication: true\ndeepspeed: zero3.json\nhub_model_id: me/it\nspecial_tokens:\n  pad_token: <p>\n  \
                      eos_token: <e>\nlora_modules_to_save: [score]\n"
            ),
            Dialect::Axolotl,
            &["model: o/n@v2", "min_lr: 2e-5", "adam_epsilon: 1e-6", "drop_duplicates: true"],
            &["special_tokens: eos_token"],
        );
        check(
            &format!(
                "{LLAMA_FACTORY}model_revision: main\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  \
                      min_lr_rate: 0.5\n  num_cycles: 2\nlearning_rate: 1e-4\ndata_seed: 7\nresume_from_checkpoint: true\n\
                      trust_remote_code: true\nadditional_target: embed_tokens\ntemplate: chatml\n"
            ),
            Dialect::LlamaFactory,
            &[
                "model: o/n",
                "lr_scheduler: cosine",
                "min_lr: 5e-5",
                "seed: 7",
                "resume: true",
                "chat_template: chatml",
            ],
            &["additional_target", "lr_scheduler_kwargs: num_cycles"],
        );
        check(
            &format!(
                "{TRL}model_revision: v3\nlr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {{num_decay_steps: 5, min_lr: 1e-6}}\n\
                      seed: 1\ndata_seed: 2\nlora_task_type: TOKEN_CLS\neval_strategy: epoch\nmetric_for_best_model: f1\n"
            ),
            Dialect::Trl,
            &[
                "model: o/n@v3",
                "decay_steps: 5",
                "min_lr: 1e-6",
                "seed: 1",
                "task: token-classification",
                "best_metric: f1",
            ],
            &["data_seed"],
        );
        check(
            &format!("{AXOLOTL}lr_scheduler: linear\ncosine_min_lr_ratio: 0.1\n"),
            Dialect::Axolotl,
            &[],
            &["cosine_min_lr_ratio"],
        );
        check(
            "base_model: ./here\nsequence_len: 64\nrevision_of_model: v2\n",
            Dialect::Axolotl,
            &["model: ./here"],
            &["revision_of_model"],
        );
    }

    #[test]
    fn losses_of_trl_name_the_task() {
        let of = |more: &str, want: &[&str], lost: &[&str]| {
            check(&format!("{TRL}{more}\n"), Dialect::Trl, want, lost)
        };
        of("loss_type: hinge\nbeta: 0.3", &["task: dpo", "loss: hinge", "beta: 0.3"], &[]);
        of("loss_type: [sigmoid, sft]\nloss_weights: [2.0, 0.5]", &["task: dpo", "nll_weight: 0.25"], &[]);
        of("loss_type: [ipo]", &["task: ipo"], &[]);
        of(
            "beta: 0.2\nprecompute_ref_log_probs: true\nsync_ref_model: true",
            &["task: dpo", "beta: 0.2"],
            &["sync_ref_model"],
        );
        of("center_rewards_coefficient: 0.01", &["task: reward", "center_rewards_coefficient: 0.01"], &[]);
        of("loss_type: dft", &[], &["loss_type"]);
        of("cpo_alpha: 0.5\nbeta: 0.1", &["task: cpo", "nll_weight: 0.5", "beta: 0.1"], &[]);
        of("cpo_alpha: 0.5\nloss_type: hinge", &["task: cpo", "loss: hinge"], &[]);
        of(
            "lora_task_type: SEQ_CLS\neval_strategy: epoch\nmetric_for_best_model: f1",
            &["task: classify"],
            &["metric_for_best_model"],
        );
        of(
            "disable_dropout: true\nlora_dropout: 0.1\nshuffle_dataset: false",
            &["dropout: 0"],
            &["lora_dropout"],
        );
        of("disable_dropout: true", &["dropout: 0"], &[]);
        of("loss_type: [sigmoid, hinge]", &["loss: sigmoid"], &["loss_type"]);
    }

    #[test]
    fn probabilities_of_sets_become_weights() {
        let of = |more: &str, want: &[&str], lost: &[&str]| {
            check(
                &format!("{LLAMA_FACTORY}dataset: a.jsonl,b.jsonl\nmix_strategy: interleave_under\n{more}"),
                Dialect::LlamaFactory,
                want,
                lost,
            );
        };
        of("interleave_probs: 0.7,0.3\n", &["data: [\"a.jsonl=0.7\", \"b.jsonl=0.3\"]"], &[]);
        of("interleave_probs: 0.7\n", &["data: [a.jsonl, b.jsonl]"], &["mix_strategy"]);
    }

    #[test]
    fn what_is_done_elsewhere_is_said_in_the_result() {
        let text = format!(
            "{TRL}push_to_hub: true\nhub_model_id: me/it\nfsdp: full_shard\nenv:\n  A_B: 0\n  C: it's\n"
        );
        let (dialect, import) = convert(&text, Path::new("c.yaml"), None).unwrap();
        let result = import.render(Path::new("c.yaml"), dialect);
        assert!(import.lost.is_empty(), "{result}");
        assert!(result.contains("# command   A_B=0 C='it'\\''s' finetune --config THIS\n"), "{result}");
        for part in
            ["# hub_model_id: me/it: `finetune push OUT owner/name`", "# fsdp: full_shard: several cards"]
        {
            assert!(result.contains(part), "{part}: {result}");
        }
    }

    /// Texts of a pretraining stage are learnt whole.
    #[test]
    fn pretraining_reads_texts() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        let info = r#"{"mine": {"file_name": "mine.json", "columns": {"prompt": "body"}}}"#;
        std::fs::write(dir.path().join("data/dataset_info.json"), info).unwrap();
        let text = "model_name_or_path: m\nstage: pt\ndataset: mine\nlora_target: all\n";
        let (dialect, import) = convert(text, &dir.path().join("c.yaml"), None).unwrap();
        let result = import.render(Path::new("c.yaml"), dialect);
        for line in ["data_fields: [\"text=body\"]", "task: sft", "long_rows: split"] {
            assert!(result.contains(&format!("\n{line}")), "{line}: {result}");
        }
    }
}
