//! metrics.jsonl: one event per line, flushed at once, so that a crashed run leaves all its events.

use crate::format::{FormatError, atomic};
use crate::support::stderr::say;
use crate::train::event::Event;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Seek, Write};
use std::path::{Path, PathBuf};

/// Writes events. A full disk ends the log, not the run: [`Metrics::finish`] returns the error.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    failed: Option<io::Error>,
}

impl Metrics {
    /// Creates the file and replaces an older one.
    pub fn create(path: &Path) -> Result<Self, FormatError> {
        let file = File::create(path).and_then(probed).map_err(|e| FormatError::io(path, e))?;
        Ok(Metrics { path: path.to_owned(), file, failed: None })
    }

    /// Continues the file of a run that is resumed after `step`: events of later steps are removed, because they will
    /// be written again. `looked` is the last step whose evaluation and prompts were completed: if it is not `step`,
    /// both are repeated, including prompts that already have an answer. A missing file counts as an empty one.
    pub fn resume(path: &Path, step: u64, looked: Option<u64>) -> Result<Self, FormatError> {
        let kept: Vec<Event> = read(path)?.into_iter().filter(|e| stands(e, step, looked)).collect();
        let mut text = String::new();
        for event in &kept {
            text += &line(event).map_err(|e| FormatError::io(path, e))?;
        }
        atomic::write_file(path, text.as_bytes())?;
        let file = OpenOptions::new().append(true).open(path).map_err(|e| FormatError::io(path, e))?;
        Ok(Metrics { path: path.to_owned(), file, failed: None })
    }

    /// Writes one event.
    pub fn see(&mut self, event: &Event) {
        if self.failed.is_none() {
            let written = line(event).and_then(|text| self.file.write_all(text.as_bytes()));
            if let Err(e) = written {
                say!("warning: {}: {e}: events are no longer written there", self.path.display());
                self.failed = Some(e);
            }
        }
    }

    /// The first failure, if there was one.
    pub fn finish(self) -> Result<(), FormatError> {
        match self.failed {
            Some(error) => Err(FormatError::io(&self.path, error)),
            None => Ok(()),
        }
    }
}

/// Fails before the run if the file accepts no data (a full disk, /dev/full): writes an empty line, which readers skip,
/// and removes it. Pipes and terminals are not written to.
fn probed(mut file: File) -> io::Result<File> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() || (is_device(&kind) && !file.is_terminal()) {
        file.write_all(b"\n")?;
    }
    if kind.is_file() {
        file.set_len(0)?;
        file.rewind()?;
    }
    Ok(file)
}

#[cfg(unix)]
fn is_device(kind: &fs::FileType) -> bool {
    std::os::unix::fs::FileTypeExt::is_char_device(kind)
}

#[cfg(not(unix))]
fn is_device(_: &fs::FileType) -> bool {
    false
}

/// The events of a metrics.jsonl. An incomplete last line after a crash is skipped; a missing file has no events.
pub fn read(path: &Path) -> Result<Vec<Event>, FormatError> {
    let bytes = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        other => other.map_err(|e| FormatError::io(path, e))?,
    };
    // An incomplete last line can end inside a character.
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let mut events = Vec::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(event) => events.push(event),
            Err(_) if i + 1 == lines.len() => {}
            Err(e) => {
                let what = format!("line {}: {e}; is this a metrics.jsonl?", i + 1);
                return Err(FormatError::Malformed { path: path.to_owned(), what });
            }
        }
    }
    Ok(events)
}

/// Whether an event remains valid after a return to `step`. An announced end is not valid.
fn stands(event: &Event, step: u64, looked: Option<u64>) -> bool {
    match event {
        Event::Done(_) | Event::Fault(_) => false,
        Event::Early(_) => false,
        Event::Sample(_) | Event::Eval(_) | Event::Best(_) if event.step() == step => looked == Some(step),
        _ => event.step() <= step,
    }
}

/// Prints one event on standard output. A closed output does not end the run.
pub fn print(event: &Event) {
    if let Ok(text) = line(event) {
        let _ = io::stdout().write_all(text.as_bytes());
    }
}

fn line(event: &Event) -> io::Result<String> {
    Ok(serde_json::to_string(event)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::{Done, Eval, RunStart, Sample, Saved};

    #[test]
    fn resumed_log_is_truncated_to_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let run = |first_step| Event::Run(RunStart { first_step, ..RunStart::default() });
        let eval = |step| Event::Eval(Eval { step, eval_loss: 0.1 + step as f64, ..Eval::default() });
        let saved = Event::Checkpoint(Saved { step: 2, path: "out/checkpoint-2".into() });
        let done = Event::Done(Done { step: 2, complete: false, path: "out".into(), seconds: 1.0 });

        let mut log = Metrics::create(&path).unwrap();
        [run(1), eval(0), eval(2), saved.clone(), eval(3), done].iter().for_each(|e| log.see(e));
        log.finish().unwrap();
        // A crash in the middle of a line, and of a character.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"event\":\"sample\",\"step\":3,\"prompt\":\"caf\xc3").unwrap();

        let mut log = Metrics::resume(&path, 2, Some(2)).unwrap();
        log.see(&run(3));
        log.see(&eval(3));
        log.finish().unwrap();
        assert_eq!(read(&path).unwrap(), [run(1), eval(0), eval(2), saved, run(3), eval(3)]);

        fs::write(&path, "{}\n{\"event\":\"eval\",\"step\":1,\"eval_loss\":1}\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn repeated_answers_are_removed_at_resume() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let sample =
            |step| Event::Sample(Sample { step, prompt: "p".into(), text: "t".into(), ..Sample::default() });
        for (looked, kept) in
            [(None, vec![sample(0)]), (Some(0), vec![sample(0)]), (Some(2), vec![sample(0), sample(2)])]
        {
            let mut log = Metrics::create(&path).unwrap();
            [sample(0), sample(2), sample(4)].iter().for_each(|e| log.see(e));
            log.finish().unwrap();
            Metrics::resume(&path, 2, looked).unwrap().finish().unwrap();
            assert_eq!(read(&path).unwrap(), kept, "looked {looked:?}");
        }
    }

    #[test]
    fn full_disk_is_reported_at_the_end() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            eprintln!("skipped: no /dev/full");
            return;
        }
        assert!(matches!(Metrics::create(full), Err(FormatError::DiskFull { .. })), "before the run");
        let file = File::create(full).unwrap();
        let mut log = Metrics { path: full.to_owned(), file, failed: None };
        log.see(&Event::Run(RunStart::default()));
        assert!(matches!(log.finish(), Err(FormatError::DiskFull { .. })));
    }
}
