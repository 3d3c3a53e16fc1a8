//! Commands of this program in processes of their own: what they print is the answer.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

/// Result of a command that prints JSON.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Its standard output.
    pub value: Option<Value>,
    /// The line with which it failed.
    pub error: Option<String>,
}

/// This program with arguments, in the root folder, without a terminal.
pub fn command(root: &Path, arguments: &[String]) -> std::io::Result<Command> {
    // On Linux also where the file was replaced by another version since the start.
    let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
    let mut command = Command::new(program);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::arg0(&mut command, "finetune");
    command.args(arguments).current_dir(root).env("NO_COLOR", "1").stdin(Stdio::null());
    // FINETUNE_BIND is the address of the page.
    command.env_remove("FINETUNE_BIND");
    Ok(command)
}

/// Runs a command to its end. `hear` gets each line of its stderr; the command ends once `hear` returns false.
pub fn run(root: &Path, arguments: &[String], hear: impl FnMut(&str) -> bool) -> Outcome {
    attempt(root, arguments, hear)
        .unwrap_or_else(|e| Outcome { value: None, error: Some(format!("the command cannot run: {e}")) })
}

fn attempt(
    root: &Path,
    arguments: &[String],
    mut hear: impl FnMut(&str) -> bool,
) -> std::io::Result<Outcome> {
    let piped = command(root, arguments)?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = piped?;
    let output = child.stdout.take().map(|mut output| {
        std::thread::spawn(move || {
            let mut text = String::new();
            output.read_to_string(&mut text).map(|_| text)
        })
    });
    let mut last = String::new();
    let lines = child.stderr.take().map(BufReader::new).into_iter().flat_map(|output| output.split(b'\n'));
    for line in lines.map_while(Result::ok) {
        last = String::from_utf8_lossy(&line).trim_end().to_string();
        if !hear(&last) {
            let _ = child.kill();
        }
    }
    let status = child.wait()?;
    let text = output.and_then(|thread| thread.join().ok()).transpose()?.unwrap_or_default();
    let value = serde_json::from_str(&text).ok();
    let error =
        (!status.success()).then(|| error_of(&last).unwrap_or_else(|| format!("it ended with {status}")));
    Ok(Outcome { value, error })
}

/// The text of an error line.
pub fn error_of(line: &str) -> Option<String> {
    line.strip_prefix("error: ").map(str::to_string)
}
