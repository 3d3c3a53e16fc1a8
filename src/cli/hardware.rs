//! `finetune devices`: what can compute here.

use super::devices;
use super::refusal::Refusal;
use super::verb::Invocation;

/// Lists the devices.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let list = devices::list();
    if inv.json {
        return inv.say(&serde_json::json!({ "devices": list }).to_string());
    }
    for (i, d) in list.iter().enumerate() {
        let gib = d.memory as f64 / (1u64 << 30) as f64;
        let features = d.features.join(" ");
        inv.say(&format!("{i}  {}  {}", d.name, d.model))?;
        inv.say(&format!("   class {}, {} cores, {gib:.1} GiB free, {features}", d.class, d.cores))?;
    }
    Ok(())
}
