//! Catches panics so that the process survives: those of a library that panics when a device is lost, and those of a
//! device's thread, whose lease then returns to the coordinator. The caller gets the panic's text. The process's own
//! panic hook, which reports a panic and ends the process, calls [`heard`] first and leaves caught panics alone.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

thread_local! {
    static WITHIN: Cell<u32> = const { Cell::new(0) };
    static PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `run`; the error is the text of its panic. The caller discards state that the panic left incomplete.
pub fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    WITHIN.set(WITHIN.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(run));
    WITHIN.set(WITHIN.get() - 1);
    let place = PLACE.take();
    result.map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        let words: Vec<&str> = text.split_whitespace().collect();
        format!("{}{place}", words.join(" "))
    })
}

/// The text of a caught panic without its source location: for users, where a library panics on bad input.
pub fn without_place(panic: &str) -> &str {
    panic.rsplit_once(" (at ").map_or(panic, |(text, _)| text)
}

/// Whether this thread's panic will be caught: other handlers do not report it then.
pub fn heard(info: &PanicHookInfo) -> bool {
    let within = WITHIN.get() > 0;
    if within {
        PLACE.set(info.location().map(|l| format!(" (at {}:{})", l.file(), l.line())).unwrap_or_default());
    }
    within
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_one_line_of_text() {
        assert_eq!(caught(|| 7), Ok(7));
        assert!(caught(|| panic!("it is {}\n   gone", 1)).unwrap_err().starts_with("it is 1 gone"));
        let nested = caught(|| caught(|| panic!("inner")).unwrap_or_else(|_: String| panic!("outer")));
        assert!(nested.is_err_and(|text: String| text.starts_with("outer")));
        assert_eq!(WITHIN.get(), 0, "a later panic is not caught");
    }
}
