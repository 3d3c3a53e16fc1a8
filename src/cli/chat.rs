//! `finetune chat`: a conversation on a terminal. Each line is a user's turn, and the model answers all previous turns.
//! A line that begins with `/` is a command.

use super::invocation::Invocation;
use super::speaker::{self, Speaker, sampling, stream};
use crate::config::refusal::Refusal;
use crate::data;
use crate::model::stage::Sampling;
use crate::run::prompt::{turn, turns_ids};
use crate::support::stderr::say;
use serde_json::Value;
use std::io::{BufRead, Write};

/// What a conversation can do, in the words of `/help`.
const HELP: &str = "\
/reset           begin a new conversation
/adapter [NAME]  let this adapter answer (`base`: the model without one); without NAME, list them
/compare [TEXT]  let the base and every adapter answer TEXT, or the last message again
/help            show this list
A line that begins with a space is a message, also if a / follows.";

/// Opens the model and converses.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let mut sampling = sampling(s)?;
    let speaker = Speaker::open(s, &speaker::adapters(s)?)?;
    sampling.stop = speaker.base.stop_ids(&speaker.tokenizer);
    let system = s.text("system")?.map(str::to_string);
    // A model without a template is refused before the first message.
    turns_ids(&speaker.tokenizer, &[turn("user", "x")])?;
    let mut talk = Talk { speaker, sampling };
    converse(&mut std::io::stdin().lock(), inv.out.as_mut(), system.as_deref(), &mut talk)
}

/// The other side of a conversation.
pub trait Partner {
    /// Streams the answer to the turns and returns it; `None` if the turns fill the model's context.
    fn answer(&mut self, turns: &[Value], out: &mut dyn Write) -> Result<Option<String>, Refusal>;

    /// The names of its voices: the base, then the adapters.
    fn names(&self) -> Vec<String>;

    /// The number of the voice that answers.
    fn now(&self) -> usize;

    /// Lets voice `which` answer.
    fn speak_as(&mut self, which: usize) -> Result<(), Refusal>;
}

/// A model as the other side.
pub struct Talk {
    /// The model.
    pub speaker: Speaker,
    /// The choice of tokens.
    pub sampling: Sampling,
}

impl Partner for Talk {
    fn answer(&mut self, turns: &[Value], out: &mut dyn Write) -> Result<Option<String>, Refusal> {
        let bytes = turns.iter().map(|turn| turn.to_string().len()).sum();
        let tokenizer = self.speaker.tokenizer.clone();
        let ids = data::bounded(&"the conversation", (bytes, usize::MAX), || turns_ids(&tokenizer, turns))?;
        let Ok(sampling) = self.speaker.within(&self.sampling, ids.len()) else { return Ok(None) };
        Ok(Some(self.speaker.answer(&ids, &sampling, |piece| stream(out, piece))?.text))
    }

    fn names(&self) -> Vec<String> {
        self.speaker.voices.iter().map(|voice| voice.name.clone()).collect()
    }

    fn now(&self) -> usize {
        self.speaker.now()
    }

    fn speak_as(&mut self, which: usize) -> Result<(), Refusal> {
        Ok(self.speaker.speak_as(which)?)
    }
}

/// A conversation so far.
struct Conversation<'a> {
    /// The system's turn, if there is one.
    first: Vec<Value>,
    turns: Vec<Value>,
    out: &'a mut dyn Write,
    partner: &'a mut dyn Partner,
}

/// Reads turns until `lines` ends.
pub fn converse(
    lines: &mut dyn BufRead,
    out: &mut dyn Write,
    system: Option<&str>,
    partner: &mut dyn Partner,
) -> Result<(), Refusal> {
    say!("type a message; /reset begins a new conversation, /help lists all commands, ctrl-D ends");
    let first: Vec<Value> = system.iter().map(|text| turn("system", text)).collect();
    let mut talk = Conversation { turns: first.clone(), first, out, partner };
    loop {
        talk.write("> ")?;
        let mut line = String::new();
        let read = lines.read_line(&mut line).map_err(|e| Refusal::failure(format!("stdin: {e}")))?;
        if read == 0 {
            return talk.write("\n");
        }
        let text = line.trim();
        match line.strip_prefix('/') {
            Some(_) => {
                let (command, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
                talk.command(command, rest.trim())?;
            }
            None if text.is_empty() => {}
            None => talk.message(text)?,
        }
    }
}

impl Conversation<'_> {
    fn command(&mut self, command: &str, rest: &str) -> Result<(), Refusal> {
        match command {
            "/reset" => self.turns = self.first.clone(),
            "/adapter" => self.switch(rest)?,
            "/compare" => self.compare(rest)?,
            "/help" => HELP.lines().for_each(|line| say!("{line}")),
            other => say!("there is no {other}: /help lists the commands; a message may begin with a space"),
        }
        Ok(())
    }

    /// Adds a user's turn and its answer.
    fn message(&mut self, text: &str) -> Result<(), Refusal> {
        self.turns.push(turn("user", text));
        match self.answer()? {
            Some(text) => self.turns.push(turn("assistant", &text)),
            None => drop(self.turns.pop()),
        }
        Ok(())
    }

    /// Writes the answer to the turns as a line.
    fn answer(&mut self) -> Result<Option<String>, Refusal> {
        let answer = self.partner.answer(&self.turns, self.out)?;
        match answer {
            Some(_) => self.write("\n")?,
            None => say!("the conversation fills the model's context: /reset begins a new one"),
        }
        Ok(answer)
    }

    fn switch(&mut self, name: &str) -> Result<(), Refusal> {
        let names = self.partner.names();
        if let Some(which) = names.iter().position(|n| n == name) {
            return self.partner.speak_as(which);
        }
        if !name.is_empty() {
            say!("there is no adapter {name}");
        }
        let now = self.partner.now();
        for (i, name) in names.iter().enumerate() {
            say!("{} {name}", if i == now { "*" } else { " " });
        }
        Ok(())
    }

    /// Lets every voice answer the same turns. A new message and the answer of the present voice join the conversation.
    fn compare(&mut self, text: &str) -> Result<(), Refusal> {
        let now = self.partner.now();
        let before = self.turns.clone();
        if text.is_empty() {
            let Some(last) = self.turns.iter().rposition(|turn| turn["role"] == "user") else {
                say!("there is no message yet: /compare TEXT");
                return Ok(());
            };
            self.turns.truncate(last + 1);
        } else {
            self.turns.push(turn("user", text));
        }
        let mut own = None;
        for (which, name) in self.partner.names().into_iter().enumerate() {
            self.write(&format!("[{name}] "))?;
            self.partner.speak_as(which)?;
            let answer = self.answer()?;
            own = if which == now { answer } else { own };
        }
        self.partner.speak_as(now)?;
        match own.filter(|_| !text.is_empty()) {
            Some(own) => self.turns.push(turn("assistant", &own)),
            None => self.turns = before,
        }
        Ok(())
    }

    fn write(&mut self, text: &str) -> Result<(), Refusal> {
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        written.map_err(|e| Refusal::failure(format!("stdout: {e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers with its voice and the number of turns; does not answer more than `room` turns.
    struct Counter {
        room: usize,
        now: usize,
    }

    impl Partner for Counter {
        fn answer(&mut self, turns: &[Value], out: &mut dyn Write) -> Result<Option<String>, Refusal> {
            if turns.len() > self.room {
                return Ok(None);
            }
            let text = format!("{}{}", ["", "t"][self.now], turns.len());
            out.write_all(text.as_bytes()).unwrap();
            Ok(Some(text))
        }

        fn names(&self) -> Vec<String> {
            vec!["base".into(), "tuned".into()]
        }

        fn now(&self) -> usize {
            self.now
        }

        fn speak_as(&mut self, which: usize) -> Result<(), Refusal> {
            self.now = which;
            Ok(())
        }
    }

    /// Checks the output for the input `typed`.
    fn check(system: Option<&str>, typed: &str, room: usize, shown: &str) {
        let (mut out, mut partner) = (Vec::new(), Counter { room, now: 0 });
        converse(&mut typed.as_bytes(), &mut out, system, &mut partner).unwrap();
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

    #[test]
    fn adapter_command_switches_the_voice() {
        check(None, "a\n/adapter tuned\nb\n/adapter base\nc\n", 9, "> 1\n> > t3\n> > 5\n> \n");
        check(None, "/adapter other\n/adapter\na\n", 9, "> > > 1\n> \n");
    }

    #[test]
    fn compared_answers_join_the_conversation_once() {
        check(None, "/compare a\nb\n", 9, "> [base] 1\n[tuned] t1\n> 3\n> \n");
        check(None, "a\nb\n/compare\nc\n", 9, "> 1\n> 3\n> [base] 3\n[tuned] t3\n> 5\n> \n");
        check(None, "/compare\na\n", 9, "> > 1\n> \n");
        // Nothing of a comparison that does not fit remains.
        check(None, "a\n/compare b\nc\n/reset\nd\n", 1, "> 1\n> [base] [tuned] > > > 1\n> \n");
    }

    #[test]
    fn unknown_commands_are_not_sent() {
        check(None, "/rset\n /etc/hosts\n/help\n", 9, "> > 1\n> > \n");
    }
}
