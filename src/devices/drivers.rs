//! What drivers are told before they are asked for adapters. Mesa's layer for choosing a card by desktop looks for one,
//! says an error of its own on stderr where there is none, and reorders adapters where there is: it is switched off.
//!
//! Unsafe, because the environment of a process is no thread's own: it is changed while there is one thread.

/// To be called first of all.
pub fn prepare() {
    if cfg!(target_os = "linux") && std::env::var_os("NODEVICE_SELECT").is_none() {
        // SAFETY: the only thread is this one, as its caller promises.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
}
