//! `finetune contracts`: the program's contracts, how each is enforced at run time, and its tests. (No existing verb
//! describes the program itself.)

use super::invocation::Invocation;
use crate::config::refusal::Refusal;
use crate::report::contracts::{Severity, all};
use serde_json::Value;

/// Lists the contracts.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let contracts = all().map_err(Refusal::failure)?;
    if inv.json {
        return inv.say(&serde_json::json!({ "contracts": contracts }).to_string());
    }
    for (i, c) in contracts.iter().enumerate() {
        if i > 0 {
            inv.say("")?;
        }
        let severity = if c.severity == Severity::Critical { "critical" } else { "major" };
        inv.say(&format!("{} ({severity})", c.id))?;
        inv.say(&format!("  {}", c.statement))?;
        inv.say(&format!("  tolerance: {}", shown(&c.tolerance)))?;
        inv.say(&format!("  enforced at: {}", c.enforced_at))?;
        inv.say(&format!("  tests: {}", c.tests.join(", ")))?;
    }
    Ok(())
}

/// Text of a tolerance: a word, or names with their bounds.
fn shown(tolerance: &Value) -> String {
    match tolerance {
        Value::String(text) => text.clone(),
        Value::Object(bounds) => {
            bounds.iter().map(|(name, bound)| format!("{name} {bound}")).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
