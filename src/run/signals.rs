//! Signals become requests to the run (`train::stop`): SIGINT after this step, and a second one at once;
//! SIGTERM now, with the last finished step, and SIGHUP too, because a connection that drops takes its terminal with
//! it; SIGUSR1 a checkpoint, and on it goes. They are watched only while there is something to save: before that the
//! system's own answer to a signal is the right one, except to SIGUSR1, which asks for a checkpoint and ends no process.
//! A SIGHUP that was ignored at the start (nohup) stays ignored.

use crate::report::Look;
use crate::support::stderr::say;
use crate::train::stop::{Stop, Urgency};

/// Raised by signals; the process has one run.
pub static STOP: Stop = Stop::new();

/// What holds from the start of the process: SIGUSR1 is ignored until there is something to save, and a file at the limit
/// of its size (SIGXFSZ) is an error of the write, as a full disk is.
#[cfg(unix)]
pub fn ignore() {
    for signal in [libc::SIGUSR1, libc::SIGXFSZ] {
        // SAFETY: ignoring a signal installs no handler, and no other thread runs yet.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Elsewhere there are no such signals.
#[cfg(not(unix))]
pub fn ignore() {}

/// Starts to listen, on a thread of its own; a quiet run says nothing of it.
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
fn ignored(signal: i32) -> bool {
    let mut now = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing changes; the present one is written, or else stays the zeroes of a default.
    let now = unsafe {
        libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    now.sa_sigaction == libc::SIG_IGN
}

/// The first time it is asked politely; the second time it ends here.
#[cfg(any(unix, windows))]
fn after_this_step(look: Look) -> Urgency {
    let before = STOP.ask(Urgency::AfterStep);
    if before != Urgency::Run {
        std::process::exit(130);
    }
    if look != Look::Quiet {
        say!("stopping after this step, with a checkpoint; once more stops at once");
    }
    before
}

/// Windows has events of the console in place of signals: Ctrl-C after this step, a second one at once; Ctrl-Break, a
/// closed window and a shutdown now. There is none for a checkpoint on the way.
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

/// Elsewhere the system's own behaviour stands.
#[cfg(not(any(unix, windows)))]
pub fn listen(_: Look) -> Result<(), std::io::Error> {
    Ok(())
}
