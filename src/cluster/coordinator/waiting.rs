//! What is said while the run waits for devices. Those of this process count as here from the start: they are only
//! being opened, and nobody has to bring them. Nothing is said twice, and nothing where all that is missing is here.

use super::super::machine::{MemberId, Note};

/// Whether the run waits for others, and what was said of it.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    here: Option<Opening>,
    /// What the machine said last: it says nothing twice, also where what was made of it here is out of date.
    heard: Option<(usize, usize)>,
    said: Option<(usize, usize)>,
    /// Too few devices are here or being opened here: nothing goes on until more come.
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
    /// So many devices of this process will come, as a member of that name.
    pub fn opens(&mut self, name: &str, devices: usize) {
        self.here = Some(Opening { name: name.to_string(), member: None, devices });
    }

    /// A member has come.
    pub fn met(&mut self, name: &str, member: MemberId) {
        if let Some(here) = self.here.as_mut().filter(|h| h.member.is_none() && h.name == name) {
            here.member = Some(member);
        }
    }

    /// A member is gone, ready or not; a note of it, where the run waits now.
    pub fn gone(&mut self, member: MemberId) -> Option<Note> {
        self.here.take_if(|h| h.member == Some(member))?;
        self.wait()
    }

    /// The run waits for more than was said: devices of this process that were counted on do not come.
    pub fn wait(&mut self) -> Option<Note> {
        let (have, want) = self.heard?;
        let have = have + self.here.as_ref().map_or(0, |h| h.devices);
        self.on = have < want;
        let new = self.on && self.said.replace((have, want)) != Some((have, want));
        new.then_some(Note::Waiting { have, want })
    }

    /// A note as it is to be said, if it is.
    pub fn hear(&mut self, note: Note) -> Option<Note> {
        match note {
            Note::Waiting { have, want } => {
                self.heard = Some((have, want));
                self.wait()
            }
            Note::Paused { .. } => {
                (self.heard, self.on) = (None, true);
                Some(note)
            }
            Note::Running { .. } => {
                self.heard = None;
                std::mem::take(&mut self.on).then_some(note)
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
        let note = |have, want| Note::Waiting { have, want };
        assert_eq!(waiting.hear(note(0, 3)), Some(note(2, 3)));
        waiting.met("here", MemberId(1));
        assert!(waiting.hear(joined("here")).is_some());
        assert_eq!(waiting.hear(note(2, 3)), None, "said already");
        assert!(waiting.on);
        assert!(waiting.hear(Note::Running { have: 3 }).is_some());
        assert!(!waiting.on);

        // All of them are here: there is nothing to wait for, and nothing to be said.
        let mut waiting = Waiting::default();
        waiting.opens("here", 2);
        assert_eq!(waiting.hear(note(0, 2)), None);
        assert_eq!(waiting.hear(Note::Running { have: 2 }), None);

        // Gone before they were ready: they do not count any longer.
        let mut waiting = Waiting::default();
        waiting.opens("here", 2);
        waiting.met("here", MemberId(1));
        assert_eq!(waiting.gone(MemberId(1)), None, "nothing was heard of a wait");
        assert_eq!(waiting.hear(note(0, 2)), Some(note(0, 2)));

        // The machine has said that it waits, and says it once. Then nobody comes after all: gone, or refused.
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
