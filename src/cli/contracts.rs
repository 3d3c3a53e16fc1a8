//! `finetune contracts`: what this program promises, what enforces each promise while it runs, and the tests that
//! try to break it. (No existing verb says anything about the program itself.)

use super::invocation::Invocation;
use crate::config::refusal::Refusal;
use crate::report::contracts::{Severity, all};
use serde_json::Value;

/// Lists them.
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

/// A word, or names with their bounds.
fn shown(tolerance: &Value) -> String {
    match tolerance {
        Value::String(text) => text.clone(),
        Value::Object(bounds) => {
            bounds.iter().map(|(name, bound)| format!("{name} {bound}")).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
