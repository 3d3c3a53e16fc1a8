//! What of the rows is trained on.

/// The supervised part of a row for --task sft. A mark of a message takes precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Learn {
    /// The answers: completions, outputs, and all turns of the assistant.
    #[default]
    Answers,
    /// The last answer of a conversation.
    Last,
    /// The marked messages of a conversation alone.
    Marked,
    /// All tokens.
    All,
}

impl Learn {
    /// All values, by their names.
    pub const ALL: [(&'static str, Learn); 4] =
        [("answers", Learn::Answers), ("last", Learn::Last), ("marked", Learn::Marked), ("all", Learn::All)];

    /// Its name; `None` for the default.
    pub fn unusual(self) -> Option<&'static str> {
        Self::ALL[1..].iter().find(|(_, learn)| *learn == self).map(|(name, _)| *name)
    }
}

/// What is done with rows longer than --max-seq-len.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LongRows {
    /// Their end is cut off.
    #[default]
    Cut,
    /// Each part of --max-seq-len tokens becomes a row.
    Split,
    /// They are left out.
    Drop,
    /// They are an error.
    Refuse,
}

impl LongRows {
    /// All values, by their names.
    pub const ALL: [(&'static str, LongRows); 4] = [
        ("cut", LongRows::Cut),
        ("split", LongRows::Split),
        ("drop", LongRows::Drop),
        ("refuse", LongRows::Refuse),
    ];
}
