//! stub
use super::refusal::Refusal;
use super::verb::Invocation;
/// stub
pub fn run(_: &mut Invocation) -> Result<(), Refusal> {
    Ok(())
}
