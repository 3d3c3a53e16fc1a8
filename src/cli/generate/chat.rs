//! A conversation on a terminal: each line is a user's turn, and the model answers all previous turns.

use crate::config::refusal::Refusal;
use crate::run::prompt::turn;
use crate::support::stderr::say;
use serde_json::Value;
use std::io::{BufRead, Write};

/// Streams the answer to the turns and returns it; `None` if the turns fill the model's context.
pub type Answer<'a> = &'a mut dyn FnMut(&[Value], &mut dyn Write) -> Result<Option<String>, Refusal>;

/// Reads turns until `lines` ends. `/reset` removes all turns but the system's.
pub fn converse(
    lines: &mut dyn BufRead,
    out: &mut dyn Write,
    system: Option<&str>,
    answer: Answer,
) -> Result<(), Refusal> {
    say!("type a message; /reset begins a new conversation, ctrl-D ends");
    let first: Vec<Value> = system.iter().map(|text| turn("system", text)).collect();
    let mut turns = first.clone();
    loop {
        write(out, "> ")?;
        let mut line = String::new();
        let read = lines.read_line(&mut line).map_err(|e| Refusal::failure(format!("stdin: {e}")))?;
        if read == 0 {
            return write(out, "\n");
        }
        match line.trim() {
            "" => continue,
            "/reset" => {
                turns = first.clone();
                continue;
            }
            text => turns.push(turn("user", text)),
        }
        match answer(&turns, out)? {
            Some(text) => {
                turns.push(turn("assistant", &text));
                write(out, "\n")?;
            }
            None => {
                turns.pop();
                say!("the conversation fills the model's context: /reset begins a new one");
            }
        }
    }
}

fn write(out: &mut dyn Write, text: &str) -> Result<(), Refusal> {
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Refusal::failure(format!("stdout: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the output for the input `typed`, with a model that answers with its number of turns and does not answer
    /// more than `room` turns.
    fn check(system: Option<&str>, typed: &str, room: usize, shown: &str) {
        let mut out = Vec::new();
        let mut answer = |turns: &[Value], out: &mut dyn Write| {
            let text = turns.len().to_string();
            if turns.len() <= room {
                write(out, &text)?;
            }
            Ok(Some(text).filter(|_| turns.len() <= room))
        };
        converse(&mut typed.as_bytes(), &mut out, system, &mut answer).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), shown, "{typed:?}");
    }

    #[test]
    fn the_conversation_keeps_its_turns_until_reset() {
        check(None, "", 9, "> \n");
        check(None, "hello\nmore\n", 9, "> 1\n> 3\n> \n");
        check(None, "hello\n\n/reset\nmore", 9, "> 1\n> > > 1\n> \n");
        check(Some("be brief"), "hello\n/reset\nhello\n", 9, "> 2\n> > 2\n> \n");
    }

    #[test]
    fn a_turn_that_does_not_fit_is_dropped() {
        check(None, "a\nb\nc\n/reset\nd\n", 1, "> 1\n> > > > 1\n> \n");
    }
}
