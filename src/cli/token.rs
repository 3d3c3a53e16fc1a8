//! `finetune token`: prints this machine's token and creates it if there is none; `--set` stores the token of another
//! machine. The secret is printed to stdout only, and is read from the terminal without echo or from stdin: never from
//! an argument, which others on the machine can read.

use super::invocation::Invocation;
use crate::config::refusal::Refusal;
use crate::net::keyring::{FoundToken, KeepError, Keyring, TokenSource, VARIABLE};
use crate::net::{NetError, SecureError, Token};
use crate::support::stderr::say;
use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;

/// Maximum bytes of an input line.
const LONGEST: u64 = 4 << 10;

/// Prints or stores the token.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let file = inv.settings.text("token-file")?.map(PathBuf::from);
    let keyring = Keyring::of_user(file.as_deref());
    let set = inv.settings.switch("set")?;
    let found = match set {
        true => {
            let token = Token::parse(&ask()?).map_err(Refusal::configuration)?;
            let (path, before) = keyring.keep(&token)?;
            if let Some(before) = before {
                say!("note: another token was there: it is kept as {}", before.display());
            }
            FoundToken { token, source: TokenSource::File(path), made: false }
        }
        false => keyring.find_or_make_there()?,
    };
    let fingerprint = found.token.fingerprint();
    if inv.json {
        let secret = if set { serde_json::Value::Null } else { found.token.text().into() };
        let line = serde_json::json!({
            "token": secret,
            "fingerprint": fingerprint.to_string(),
            "kept_in": found.source.to_string(),
            "made": found.made,
        });
        return inv.say(&line.to_string());
    }
    if set && keyring.is_overruled() {
        say!("warning: {VARIABLE} is set and comes before it");
    }
    if set {
        return inv.say(&format!("kept in {}, fingerprint {fingerprint}", found.source));
    }
    inv.say(&found.token.text())?;
    let kept = if found.made { "made and kept in" } else { "kept in" };
    say!("fingerprint {fingerprint}, {kept} {}; on another machine: finetune token --set", found.source);
    Ok(())
}

/// Reads the token from the terminal without echo, or from the first line of stdin.
fn ask() -> Result<String, Refusal> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        let prompt = "token (paste it; it is not shown): ";
        return rpassword::prompt_password(prompt).map_err(|e| Refusal::failure(format!("terminal: {e}")));
    }
    let mut line = String::new();
    let read = stdin.lock().take(LONGEST).read_line(&mut line);
    read.map_err(|e| Refusal::failure(format!("stdin: {e}")))?;
    match line.trim().is_empty() {
        true => Err(Refusal::configuration(
            "stdin: no token: paste what `finetune token` prints on the other machine",
        )),
        false => Ok(line),
    }
}

impl From<KeepError> for Refusal {
    fn from(e: KeepError) -> Self {
        match e {
            KeepError::File { .. } | KeepError::NoRandom(_) => Refusal::failure(e),
            _ => Refusal::configuration(e),
        }
    }
}

impl From<SecureError> for Refusal {
    fn from(e: SecureError) -> Self {
        match e {
            SecureError::Keep(e) => e.into(),
            SecureError::Net(e) => e.into(),
        }
    }
}

impl From<NetError> for Refusal {
    fn from(e: NetError) -> Self {
        if e.is_final() { Refusal::configuration(e) } else { Refusal::failure(e) }
    }
}
