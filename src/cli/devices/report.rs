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
    let keys = ["finetune", "target", "system", "kernel", "nvidia", "variables", "vulkan"];
    keys.into_iter().filter_map(|key| Some(format!("{key:<10} {}", text(&facts[key])?))).collect()
}

/// A value as text; `None` where it says nothing.
fn text(value: &Value) -> Option<String> {
    let joined = |parts: Vec<String>, between: &str| (!parts.is_empty()).then(|| parts.join(between));
    match value {
        Value::Null | Value::Bool(false) => None,
        Value::String(text) => Some(text.clone()),
        Value::Array(all) => joined(all.iter().filter_map(text).collect(), ", "),
        Value::Object(all) => {
            let part = |(key, value): (&String, &Value)| match value {
                Value::Bool(true) => Some(key.clone()),
                other => Some(format!("{key} {}", text(other)?)),
            };
            joined(all.iter().filter_map(part).collect(), "; ")
        }
        other => Some(other.to_string()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_hold_what_is_known_in_words() {
        let vulkan = json!({"loader": null, "drivers": ["a.json", "b.json"], "wsl": false, "container": true, "nodes": []});
        let facts = json!({"finetune": "0.1.0", "nvidia": null, "variables": {}, "vulkan": vulkan});
        assert_eq!(lines(&facts), ["finetune   0.1.0", "vulkan     drivers a.json, b.json; container"]);
    }
}
