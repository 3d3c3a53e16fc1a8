//! Trials of the kernels that a card may lack or compute wrongly, each in a process of its own: this program with a
//! hidden verb. A fault or a hang ends that process and costs the tier, not the card: after a fault no later call of
//! the process that had it succeeds.

use super::verdicts::{Tier, Verdict};
use crate::backend::cuda::{self, AttentionTrial, Flash, Trial};
use crate::backend::{Cuda, Fault};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The hidden verb. Its arguments are the ordinal of a card and the name of a tier.
pub const VERB: &str = "trial-of-cuda";
/// How long a process may take to end after its answer.
const ENDS: Duration = Duration::from_secs(5);

/// The verdict of a trial in a process of its own, or why it decided nothing.
pub fn in_a_child(ordinal: usize, tier: Tier) -> Result<Verdict, String> {
    let patience = cuda::patience_in_trials();
    let program = std::env::current_exe().map_err(|e| format!("this program is not found: {e}"))?;
    let mut command = Command::new(program);
    command.args([VERB, &ordinal.to_string(), tier.name()]).stdin(Stdio::null()).stdout(Stdio::piped());
    command.env(cuda::WAIT, patience.as_secs().to_string());
    let mut child = command.spawn().map_err(|e| format!("its process does not start: {e}"))?;
    let (answer, answered) = mpsc::channel();
    let out = child.stdout.take();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = out.map(|out| BufReader::new(out).read_line(&mut line));
        let _ = answer.send(line);
    });
    let limit = 3 * patience;
    let line = answered.recv_timeout(limit);
    if line.is_err() {
        let _ = child.kill();
    }
    let status = ended(&mut child);
    match line.map(|line| serde_json::from_str(&line)) {
        Err(_) => Ok(Verdict::no(format!("the trial did not end within {} s", limit.as_secs()))),
        Ok(Ok(verdict)) => verdict,
        Ok(Err(_)) => match status {
            Some(status) if status.success() => Err("the trial gave no verdict".into()),
            Some(status) if stopped_from_outside(&status) => Err(format!("the trial ended by {status}")),
            Some(status) => Ok(Verdict::no(format!("the trial ended by {status}"))),
            None => Ok(Verdict::no("the trial did not end".into())),
        },
    }
}

/// Whether a signal to many processes ended it: one of a terminal, of a service or of a system without memory.
fn stopped_from_outside(status: &ExitStatus) -> bool {
    #[cfg(unix)]
    {
        use rustix::process::Signal;
        use std::os::unix::process::ExitStatusExt;
        let from_outside = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::KILL];
        status.signal().is_some_and(|signal| from_outside.iter().any(|s| s.as_raw() == signal))
    }
    #[cfg(not(unix))]
    {
        let _ = status;
        false
    }
}

/// Waits for the end of a process, then kills it. The driver may hold even a killed one.
fn ended(child: &mut Child) -> Option<ExitStatus> {
    for kill in [true, false] {
        let began = Instant::now();
        while began.elapsed() < ENDS {
            if let Ok(Some(status)) = child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if kill {
            let _ = child.kill();
        }
    }
    None
}

/// The answer of the hidden verb, in one line; `None` where it was not typed.
pub fn answer(args: &[String]) -> Option<String> {
    let [verb, ordinal, tier] = args else { return None };
    let (ordinal, tier) = (ordinal.parse().ok()?, Tier::named(tier)?);
    (verb == VERB).then(|| serde_json::to_string(&verdict(ordinal, tier)).unwrap_or_default())
}

fn verdict(ordinal: usize, tier: Tier) -> Result<Verdict, String> {
    let said = |fault: Fault| fault.to_string();
    let device = Cuda::open(ordinal).map_err(said)?;
    let (device, why) = match tier {
        Tier::F16 => why(device.sm70(Trial::default()), |d| d.below()),
        Tier::Products => why(device.bf16().map_err(said)?.sm90a(Trial::default()), |d| d.below()),
        Tier::Attention => {
            let device = device.bf16().map_err(said)?.attention_sm90a(AttentionTrial::default());
            why(device, |d| d.attention_below())
        }
    };
    if device.undecided() {
        return Err(why.unwrap_or_default());
    }
    let Flash { forward, backward } = match tier {
        Tier::Attention => device.flash(),
        _ => Flash { forward: why.is_none(), backward: why.is_none() },
    };
    Ok(Verdict { forward, backward, why })
}

/// A device with what its trial said.
fn why<T>(device: T, said: impl Fn(&T) -> Option<&str>) -> (T, Option<String>) {
    let why = said(&device).map(String::from);
    (device, why)
}
