//! What is said while the run waits for devices. Those of this process count as here from the start: they are only
//! being opened, and nobody has to bring them. Nothing is said twice, and nothing where all that is missing is here.

use super::super::machine::{MemberId, Note};

/// Whether the run waits for others, and what was said of it.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    here: Option<Opening>,
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

    /// A member is gone, ready or not.
    pub fn gone(&mut self, member: MemberId) {
        self.here.take_if(|h| h.member == Some(member));
    }

    /// A note as it is to be said, if it is.
    pub fn hear(&mut self, note: Note) -> Option<Note> {
        match note {
            Note::Waiting { have, want } => {
                let have = have + self.here.as_ref().map_or(0, |h| h.devices);
                self.on = have < want;
                let new = self.on && self.said.replace((have, want)) != Some((have, want));
                new.then_some(Note::Waiting { have, want })
            }
            Note::Paused { .. } => {
                self.on = true;
                Some(note)
            }
            Note::Running { .. } => std::mem::take(&mut self.on).then_some(note),
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
    fn devices_of_this_process_are_here_before_they_are_ready() {
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
        waiting.gone(MemberId(1));
        assert_eq!(waiting.hear(note(0, 2)), Some(note(0, 2)));
    }
}
