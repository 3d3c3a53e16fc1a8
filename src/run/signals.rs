//! Signals become requests to the run (`train::stop`): SIGINT stops after this step, a second SIGINT stops now; SIGTERM
//! stops now with the last finished step, and so does SIGHUP, because a dropped connection closes its terminal; SIGUSR1
//! writes a checkpoint and continues. Signals are handled only while there is something to save: before that the
//! system's default is right, except for SIGUSR1, which must not end the process, and except for the first process of a
//! container. A SIGHUP that was ignored at the start (nohup) stays ignored.

use crate::report::Look;
use crate::support::stderr::say;
use crate::train::stop::{Stop, Urgency};
#[cfg(unix)]
use signal_hook::flag::register_conditional_shutdown;
#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(unix)]
use std::sync::{Arc, LazyLock};

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
    // The system discards signals of the first process of a container unless it has a handler. Without one a container
    // that is stopped early would run to the end of its grace period.
    if std::process::id() == 1 {
        for signal in [libc::SIGTERM, libc::SIGINT] {
            let _ = register_conditional_shutdown(signal, 128 + signal, Arc::clone(&NOTHING_TO_SAVE));
        }
    }
}

/// True until other handlers of SIGTERM and SIGINT are registered.
#[cfg(unix)]
static NOTHING_TO_SAVE: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| Arc::new(AtomicBool::new(true)));

/// From now on SIGTERM and SIGINT reach only the handlers that the caller has registered.
#[cfg(unix)]
pub fn taken_over() {
    NOTHING_TO_SAVE.store(false, Ordering::SeqCst);
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
    taken_over();
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
