//! Panics that end no process: a library's, where it has no other way to say that a card is gone, and a device's, whose
//! lease goes back to others. Whoever catches one gets its text. The process's own hook asks [`heard`] first, because
//! it says and ends everything that nobody catches.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

thread_local! {
    static WITHIN: Cell<u32> = const { Cell::new(0) };
    static PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs it; the error is the text of its panic. What it leaves half done is the caller's to let go.
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

/// The text of a caught panic without its place in the source: for users, where a library panics on bad input.
pub fn without_place(panic: &str) -> &str {
    panic.rsplit_once(" (at ").map_or(panic, |(text, _)| text)
}

/// Whether this thread's panic will be caught: then no other handler reports it.
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
        assert_eq!(WITHIN.get(), 0, "what comes after is nobody's to catch");
    }
}
