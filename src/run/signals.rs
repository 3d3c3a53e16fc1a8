//! Signals become requests to the run (`train::stop`): SIGINT stops after this step, a second SIGINT stops now; SIGTERM
//! stops now with the last finished step, and so does SIGHUP, because a dropped connection closes its terminal; SIGUSR1
//! writes a checkpoint and continues. Signals are handled only while there is something to save: before that the
//! system's default is right, except for SIGUSR1, which must not end the process. A SIGHUP that was ignored at the
//! start (nohup) stays ignored.

use crate::report::Look;
use crate::support::stderr::say;
use crate::train::stop::{Stop, Urgency};

/// Set by signals; the process has one run.
pub static STOP: Stop = Stop::new();

/// Sets the signal actions for the whole process: SIGUSR1 is ignored until there is something to save, and a file at
/// its size limit (SIGXFSZ) is an error of the write, like a full disk.
#[cfg(unix)]
pub fn ignore() {
    for signal in [libc::SIGUSR1, libc::SIGXFSZ] {
        // SAFETY: ignoring a signal installs no handler, and no other thread runs yet.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Other systems do not have these signals.
#[cfg(not(unix))]
pub fn ignore() {}

/// Starts listening on a separate thread; a quiet run prints nothing about signals.
#[cfg(unix)]
pub fn listen(look: Look) -> Result<(), std::io::Error> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1])?;
    if !ignored(SIGHUP) {
        signals.add_signal(SIGHUP)?;
    }
    std::thread::spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => STOP.ask_checkpoint(),
                SIGTERM | SIGHUP => {
                    STOP.ask(Urgency::Now);
                }
                _ => {
                    after_this_step(look);
                }
            }
        }
    });
    Ok(())
}

/// Whether the process was started with this signal ignored, as nohup does.
#[cfg(unix)]
pub fn ignored(signal: i32) -> bool {
    let mut now = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing changes; the current action is written, or the zeroes of the default remain.
    let now = unsafe {
        libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    now.sa_sigaction == libc::SIG_IGN
}

/// The urgency of an interrupt: after this step the first time, at once the second time.
#[cfg(any(unix, windows))]
fn after_this_step(look: Look) -> Urgency {
    let before = STOP.ask(Urgency::AfterStep);
    if before != Urgency::Run {
        crate::support::end::leave(130);
    }
    if look != Look::Quiet {
        say!("stopping after this step, with a checkpoint; once more stops at once");
    }
    before
}

/// Windows has console events in place of signals: Ctrl-C stops after this step, a second one at once; Ctrl-Break, a
/// closed window and a shutdown stop now. There is no event for a checkpoint without a stop.
#[cfg(windows)]
pub fn listen(look: Look) -> Result<(), std::io::Error> {
    use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let entered = runtime.enter();
    let (mut c, mut brk, mut close, mut end) = (ctrl_c()?, ctrl_break()?, ctrl_close()?, ctrl_shutdown()?);
    drop(entered);
    std::thread::spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    Some(()) = c.recv() => after_this_step(look),
                    Some(()) = brk.recv() => STOP.ask(Urgency::Now),
                    Some(()) = close.recv() => STOP.ask(Urgency::Now),
                    Some(()) = end.recv() => STOP.ask(Urgency::Now),
                    else => return,
                };
            }
        });
    });
    Ok(())
}

/// Other systems keep their default behaviour.
#[cfg(not(any(unix, windows)))]
pub fn listen(_: Look) -> Result<(), std::io::Error> {
    Ok(())
}
