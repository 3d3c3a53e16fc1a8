//! The hooks of a build without faults.

/// No faults: no variable is read, and every hook is empty.
#[derive(Debug, Clone, Default)]
pub struct Inject {}

#[allow(missing_docs, reason = "faults.rs describes the hooks")]
impl Inject {
    pub fn from_environment() -> Result<Self, String> {
        Ok(Inject {})
    }

    pub fn opening(&self, _: usize) -> Result<(), String> {
        Ok(())
    }

    pub fn before(&self, _: u64) -> Result<(), String> {
        Ok(())
    }

    pub fn after(&self, _: u64, _: &mut [f32], _: i64) {}

    pub fn damages_parameters(&self, _: u64) -> bool {
        false
    }

    pub fn fails_selftest(&self) -> bool {
        false
    }

    pub fn slow(&self) -> Option<f64> {
        None
    }
}
