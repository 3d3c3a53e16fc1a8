//! Signals become requests to the run (`train::stop`): SIGINT after this step, and a second one at once;
//! SIGTERM now, with the last finished step; SIGUSR1 a checkpoint, and on it goes. They are watched only while
//! there is something to save: before that the system's own answer to a signal is the right one.

use crate::report::Look;
use crate::train::stop::{Stop, Urgency};

/// Raised by signals; the process has one run.
pub static STOP: Stop = Stop::new();

/// Starts to listen, on a thread of its own; a quiet run says nothing of it.
#[cfg(unix)]
pub fn listen(look: Look) -> Result<(), std::io::Error> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => STOP.ask_checkpoint(),
                SIGTERM => {
                    STOP.ask(Urgency::Now);
                }
                _ if STOP.ask(Urgency::AfterStep) == Urgency::Run => {
                    if look != Look::Quiet {
                        eprintln!("stopping after this step, with a checkpoint; once more stops at once");
                    }
                }
                _ => std::process::exit(130),
            }
        }
    });
    Ok(())
}

/// Elsewhere the system's own behaviour stands.
#[cfg(not(unix))]
pub fn listen(_: Look) -> Result<(), std::io::Error> {
    Ok(())
}
