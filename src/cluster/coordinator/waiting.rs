//! Notes while the run waits for devices. Devices of this process count as present from the start, because they are
//! already being opened. A note is shown once, and not at all if only devices of this process are missing.

use super::super::machine::{Counted, MemberId, Note};

/// Whether the run waits for other devices, and the note that was shown.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    here: Option<Opening>,
    /// The machine's last note. The machine repeats none, so it is kept to make a new note when this process's
    /// devices change.
    heard: Option<(usize, usize, Counted)>,
    said: Option<(usize, usize)>,
    /// Whether too few devices are present or being opened here: no work is done until more join.
    pub on: bool,
}

/// Devices of this process that are not ready yet.
#[derive(Debug)]
struct Opening {
    name: String,
    member: Option<MemberId>,
    devices: usize,
}

impl Waiting {
    /// Announces `devices` devices of this process that will join as the member `name`.
    pub fn opens(&mut self, name: &str, devices: usize) {
        self.here = Some(Opening { name: name.to_string(), member: None, devices });
    }

    /// A member has joined.
    pub fn met(&mut self, name: &str, member: MemberId) {
        if let Some(here) = self.here.as_mut().filter(|h| h.member.is_none() && h.name == name) {
            here.member = Some(member);
        }
    }

    /// A member has left, ready or not. Returns a note if the run waits now.
    pub fn gone(&mut self, member: MemberId) -> Option<Note> {
        self.here.take_if(|h| h.member == Some(member))?;
        self.wait()
    }

    /// The note that the run waits for more devices than shown before, after devices of this process did not become
    /// ready.
    pub fn wait(&mut self) -> Option<Note> {
        let (have, want, counts) = self.heard?;
        let here = self.here.as_ref().map_or(0, |h| match counts {
            Counted::Devices | Counted::Checkable => h.devices,
            Counted::Tasks => h.devices.min(1),
        });
        let have = have + here;
        self.on = have < want;
        let new = self.on && self.said.replace((have, want)) != Some((have, want));
        new.then_some(Note::Waiting { have, want, counts })
    }

    /// The note to show for a note of the machine, if any.
    pub fn hear(&mut self, note: Note) -> Option<Note> {
        match note {
            Note::Waiting { have, want, counts } => {
                self.heard = Some((have, want, counts));
                self.wait()
            }
            Note::Paused { .. } => {
                (self.heard, self.on) = (None, true);
                Some(note)
            }
            Note::Running { .. } => {
                self.heard = None;
                let said = self.said.take().is_some();
                (std::mem::take(&mut self.on) || said).then_some(note)
            }
            Note::Joined { ref member, .. } => {
                self.here.take_if(|h| h.name == *member);
                Some(note)
            }
            note => Some(note),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(member: &str) -> Note {
        Note::Joined { member: member.into(), devices: vec![], refused: vec![] }
    }

    #[test]
    fn own_devices_count_before_they_are_ready() {
        let mut waiting = Waiting::default();
        waiting.opens("here", 2);
        let note = |have, want| Note::Waiting { have, want, counts: Counted::Devices };
        assert_eq!(waiting.hear(note(0, 3)), Some(note(2, 3)));
        waiting.met("here", MemberId(1));
        assert!(waiting.hear(joined("here")).is_some());
        assert_eq!(waiting.hear(note(2, 3)), None, "said already");
        assert!(waiting.on);
        assert!(waiting.hear(Note::Running { have: 3 }).is_some());
        assert!(!waiting.on);

        // As a task they count once.
        let mut waiting = Waiting::default();
        waiting.opens("here", 2);
        let tasks = |have| Note::Waiting { have, want: 3, counts: Counted::Tasks };
        assert_eq!(waiting.hear(tasks(0)), Some(tasks(1)));

        // All of them are present: the run does not wait, and no note is shown.
        let mut waiting = Waiting::default();
        waiting.opens("here", 2);
        assert_eq!(waiting.hear(note(0, 2)), None);
        assert_eq!(waiting.hear(Note::Running { have: 2 }), None);

        // The other device joins while this one is being opened: the wait was shown, so its end is shown.
        let mut waiting = Waiting::default();
        waiting.opens("here", 1);
        assert_eq!(waiting.hear(note(0, 2)), Some(note(1, 2)));
        assert_eq!(waiting.hear(note(1, 2)), None);
        assert!(!waiting.on);
        assert_eq!(waiting.hear(Note::Running { have: 2 }), Some(Note::Running { have: 2 }));

        // Lost before they were ready: they no longer count.
        let mut waiting = Waiting::default();
        waiting.opens("here", 2);
        waiting.met("here", MemberId(1));
        assert_eq!(waiting.gone(MemberId(1)), None, "nothing was heard of a wait");
        assert_eq!(waiting.hear(note(0, 2)), Some(note(0, 2)));

        // The machine reported its wait once. Then the member leaves or is refused.
        for refused in [false, true] {
            let mut waiting = Waiting::default();
            waiting.opens("here", 2);
            waiting.met("here", MemberId(1));
            assert_eq!(waiting.hear(note(0, 2)), None);
            assert!(!waiting.on);
            let late = match refused {
                true => waiting.hear(joined("here")).and_then(|_| waiting.wait()),
                false => waiting.gone(MemberId(1)),
            };
            assert_eq!(late, Some(note(0, 2)));
            assert!(waiting.on);
        }
    }
}
