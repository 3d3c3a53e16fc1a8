//! The command line: verbs and their output. `config` parses the options; `run` trains.

mod bench;
mod chat;
mod contracts;
mod devices;
mod dispatch;
mod doctor;
mod eval;
mod export;
mod generate;
mod help;
mod import;
mod inspect;
mod invocation;
mod listening;
mod plan;
mod predict;
mod push;
mod report;
mod serve;
mod speaker;
mod studio;
mod token;
mod train;

use crate::support::end::leave;
use crate::support::stderr::say;
use std::io::Write;

/// Runs the command line and ends the process; the last line on stderr is the error.
pub fn main() -> ! {
    crate::run::signals::ignore();
    crate::devices::prepare();
    std::panic::set_hook(Box::new(one_line_panic));
    let args: Result<Vec<String>, _> = std::env::args_os().skip(1).map(|a| a.into_string()).collect();
    let outcome = std::panic::catch_unwind(|| match args {
        Ok(args) => dispatch::dispatch(&args),
        Err(a) => Err(crate::config::refusal::Refusal::usage(format!("argument {a:?} is not UTF-8"))),
    });
    let code = match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(refusal)) => {
            say!("error: {refusal}");
            refusal.code()
        }
        // A thread of rayon has already reported the error.
        Err(_) => 1,
    };
    let _ = std::io::stdout().flush();
    leave(code)
}

/// Prints a panic as one line without a backtrace: a panic is a bug, never an answer to invalid input. A reader that
/// closed the pipe (`| head`) is no error; a panic caught on a device's thread ends that device, not the process.
fn one_line_panic(info: &std::panic::PanicHookInfo) {
    let text = info.payload_as_str().unwrap_or("no message").replace('\n', "; ");
    if crate::support::panics::heard(info) {
        return;
    }
    if text.starts_with("failed printing to std") {
        leave(141);
    }
    // Messages of the standard library and of rayon.
    if ["failed to spawn thread", "ThreadPoolBuildError"].iter().any(|part| text.contains(part)) {
        say!(
            "error: the system starts no further thread: lower --threads, or raise the limit (ulimit -u, ulimit -v)"
        );
        leave(1);
    }
    let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
    say!("error: internal error{place}: {text}; please report it with the command that was run");
    // rayon passes a panic to the thread that waits for the work, which may be a device's thread that continues.
    if rayon::current_thread_index().is_none() {
        leave(1);
    }
}
