//! Environment variables: every option has one, and all other variables that are read are listed here. An unknown
//! variable with our prefix is an error, because containers and units are configured by variables alone.

use super::alias::ALIASES;
use super::refusal::{Refusal, nearest};
use super::table::{self, Opt, TABLE};
use super::typed::{Origin, Typed};

/// Prefix of all variables of finetune.
const PREFIX: &str = "FINETUNE_";

/// Variables besides options: the name, and its reader.
#[rustfmt::skip]
pub const OTHERS: &[(&str, &str)] = &[
    ("FINETUNE_TOKEN", "the token that the machines of a run share"),
    ("FINETUNE_API_KEY", "the key that clients of `finetune serve` send"),
    ("FINETUNE_CPU", "the best instructions that the CPU backend may use: avx512, avx2, generic; neon"),
    ("FINETUNE_CUDA_WAIT", "seconds without an answer after which an NVIDIA card counts as hung (default: 120)"),
    #[cfg(feature = "faults")]
    ("FINETUNE_INJECT", "faults of a worker, for tests"),
    ("FINETUNE_BINARY", "tests"), ("FINETUNE_CASES", "tests"), ("FINETUNE_HEADS", "tests"), ("FINETUNE_CUDA_TOOLS", "tests"),
    ("FINETUNE_AARCH64_BINARY", "tests"), ("FINETUNE_WINDOWS_BINARY", "tests"), ("FINETUNE_NEED_CHROMIUM", "tests"),
    ("FINETUNE_CHAOS_BLOWS", "tests"), ("FINETUNE_CHAOS_SECONDS", "tests"), ("FINETUNE_CHAOS_SEED", "tests"),
    ("FINETUNE_FUZZ_CASE", "tests"), ("FINETUNE_FUZZ_CASES", "tests"), ("FINETUNE_FUZZ_FORMAT", "tests"),
    ("FINETUNE_FUZZ_SEED", "tests"), ("FINETUNE_NEED_RSVG", "tests"), ("FINETUNE_NEED_SLURM", "tests"), ("FINETUNE_NEED_MPI", "tests"), ("FINETUNE_NEED_PROMETHEUS", "tests"), ("FINETUNE_NEED_TENSORBOARD", "tests"), ("FINETUNE_NEED_OPENAI", "tests"), ("FINETUNE_NEED_MLX", "tests"), ("FINETUNE_NEED_HUB_CLIENT", "tests"), ("FINETUNE_NEED_VULKAN", "tests"),
    ("FINETUNE_CONTAINER_BASE", "tests"), ("FINETUNE_NEED_KUBEFLOW", "tests"),
    ("FINETUNE_PICTURES", "tests"), ("FINETUNE_PTX_DEVICE", "tests"), ("FINETUNE_PTX_SWITCHES", "tests"), ("FINETUNE_REAL_BLOCKS", "tests"),
    ("FINETUNE_REQUIRE_PTXAS", "tests"), ("FINETUNE_ROWS", "tests"), ("FINETUNE_SEEDS", "tests"),
    ("FINETUNE_SMOLLM2", "tests"), ("FINETUNE_TEST_CUT_SHORT", "tests"), ("FINETUNE_SMOLLM2_GGUF", "tests"), ("FINETUNE_TEST_ADAPTER", "tests"), ("FINETUNE_NEED_RADV", "tests"), ("FINETUNE_NEED_SPIRV", "tests"), ("FINETUNE_TEMPLATE_CASES", "tests"),
];

/// The options that are set in the environment, as a layer.
pub fn environment(read: impl Fn(&str) -> Option<String>) -> Vec<Typed> {
    let typed = |(key, variable): (String, String)| {
        let value = read(&variable).filter(|v| !v.is_empty())?;
        Some(Typed { key, values: vec![value], source: Origin::Variable(variable) })
    };
    TABLE.iter().flat_map(names).filter_map(typed).collect()
}

/// Keys of an option, each with its variable.
fn names(o: &Opt) -> Vec<(String, String)> {
    let mut names = vec![(o.key(), o.variable())];
    if o.is_on() {
        let key = format!("no_{}", o.key());
        let variable = table::variable(&key);
        names.push((key, variable));
    }
    let aliases = ALIASES.iter().filter(|(_, ours)| *ours == o.key());
    names.extend(aliases.map(|(theirs, _)| (theirs.to_string(), table::variable(theirs))));
    names
}

/// Whether a variable is read.
pub fn is_known(name: &str) -> bool {
    let other = OTHERS.iter().any(|(other, _)| *other == name);
    other || TABLE.iter().flat_map(names).any(|(_, variable)| variable == name)
}

/// Refuses the first variable in `set` with our prefix that is unknown.
pub fn check(set: impl Iterator<Item = String>) -> Result<(), Refusal> {
    let mut unknown: Vec<String> =
        set.filter(|name| name.starts_with(PREFIX) && !is_known(name) && !is_of_a_service(name)).collect();
    unknown.sort();
    let Some(name) = unknown.first() else { return Ok(()) };
    let known: Vec<String> = TABLE.iter().map(Opt::variable).collect();
    let others = OTHERS.iter().filter(|(_, what)| *what != "tests").map(|(name, _)| *name);
    // The common prefix must not count as similarity.
    let rest = |name: &'static str| name.trim_start_matches(PREFIX);
    let typed = name.trim_start_matches(PREFIX);
    let near = nearest(typed, known.iter().map(|k| k.trim_start_matches(PREFIX)).chain(others.map(rest)));
    let hint = match near {
        Some(near) => format!("did you mean {PREFIX}{near}?"),
        None => "`finetune help options` lists the options; their variables are FINETUNE_ and the key".into(),
    };
    Err(Refusal::configuration(format!("unknown environment variable {name}: {hint}")))
}

/// Whether a variable is one of those that Kubernetes sets in every container for a Service named `finetune` or
/// `finetune-x`.
pub fn is_of_a_service(name: &str) -> bool {
    let parts = ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT_"];
    let option = table::find(&name.trim_start_matches(PREFIX).replace('_', "-").to_lowercase());
    option.is_none() && (name.ends_with("_PORT") || parts.iter().any(|part| name.contains(part)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variable_gets_a_suggestion() {
        let line =
            |name: &str| check([name.to_string(), "PATH".into()].into_iter()).map_err(|e| (e.code(), e.line));
        for known in
            ["FINETUNE_RANK", "FINETUNE_TOKEN", "FINETUNE_NO_SHUFFLE", "FINETUNE_EARLY_STOPPING", "FINETUNES"]
        {
            assert_eq!(line(known), Ok(()), "{known}");
        }
        for service in ["FINETUNE_PORT", "FINETUNE_SERVICE_HOST", "FINETUNE_COORDINATOR_PORT_9000_TCP_ADDR"] {
            assert_eq!(line(service), Ok(()), "{service}");
        }
        for (name, part) in [
            ("FINETUNE_RNAK", "FINETUNE_RNAK: did you mean FINETUNE_RANK?"),
            ("FINETUNE_TOKNE", "did you mean FINETUNE_TOKEN?"),
            ("FINETUNE_LEARNING-RATE", "did you mean FINETUNE_LEARNING_RATE?"),
            ("FINETUNE_XYZZY", "`finetune help options`"),
        ] {
            let (code, line) = line(name).unwrap_err();
            assert!(code == 78 && line.contains(part), "{line}");
        }
    }
}
