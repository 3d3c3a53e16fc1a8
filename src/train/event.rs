//! The run speaks once: these are all that it says. metrics.jsonl is this stream; terminal, page and report
//! are pure functions of it.
