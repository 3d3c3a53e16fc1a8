//! A report for developers without the card: versions, drivers, limits, and the result of the self-test. The report
//! does not identify the user: home folders are shortened, host and user names are left out.

use crate::config::refusal::Refusal;
use crate::devices::{self, Listed};
use crate::format::atomic;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Prefixes of environment variables that change the behaviour of drivers.
const VARIABLES: [&str; 8] = ["VK_", "WGPU_", "MESA_", "RADV_", "ANV_", "LP_", "NVIDIA_", "LIBGL_"];

/// Writes the report.
pub fn write(path: &Path, found: &[Listed]) -> Result<(), Refusal> {
    let text = serde_json::to_string_pretty(&facts(found)).map_err(Refusal::failure)?;
    atomic::write_file(path, (text + "\n").as_bytes())?;
    Ok(())
}

/// The facts in lines, without the devices and what is not known.
pub fn lines(facts: &Value) -> Vec<String> {
    let shown = |(key, value): (&str, &Value)| match value {
        Value::Null => None,
        Value::String(text) => Some(format!("{key:<10} {text}")),
        Value::Object(all) if all.is_empty() => None,
        other => Some(format!("{key:<10} {other}")),
    };
    let keys = ["finetune", "target", "system", "kernel", "nvidia", "variables", "vulkan"];
    keys.into_iter().filter_map(|key| shown((key, &facts[key]))).collect()
}

/// What the report contains.
pub fn facts(found: &[Listed]) -> Value {
    let first_line = |path: &str| {
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.lines().next()?.to_string())
    };
    let system = std::fs::read_to_string("/etc/os-release").ok().and_then(|text| {
        let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
        Some(name.trim_matches('"').to_string())
    });
    json!({
        "finetune": env!("CARGO_PKG_VERSION"),
        "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        "system": system,
        "kernel": first_line("/proc/sys/kernel/osrelease"),
        "nvidia": first_line("/proc/driver/nvidia/version"),
        "variables": variables(),
        "vulkan": devices::drivers(),
        "no_gpu": devices::no_gpu(found).map(|why| why.to_string()),
        "no_cuda": devices::no_cuda(),
        "devices": found,
    })
}

fn variables() -> Map<String, Value> {
    let home = std::env::home_dir().map(|home| home.display().to_string()).filter(|home| home.len() > 1);
    let ours = std::env::vars().filter(|(name, _)| VARIABLES.iter().any(|start| name.starts_with(start)));
    ours.map(|(name, value)| {
        let value = home.as_ref().map_or(value.clone(), |home| value.replace(home.as_str(), "~"));
        (name, value.into())
    })
    .collect()
}
