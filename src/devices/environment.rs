//! Settings of drivers before adapters are listed. Mesa's layer for choosing a card by desktop prints an error on
//! stderr if it finds no desktop, and otherwise reorders adapters: it is disabled.
//!
//! This is unsafe, because the environment belongs to the whole process: it is changed while there is one thread.

/// Must be called before all other code.
pub fn prepare() {
    if cfg!(target_os = "linux") && std::env::var_os("NODEVICE_SELECT").is_none() {
        // SAFETY: the caller guarantees that this is the only thread.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
}
