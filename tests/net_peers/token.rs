//! The command `finetune token`.

use finetune::net::Token;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs the binary with a separate home folder.
fn finetune(home: &Path, args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_finetune"))
        .args(args)
        .env_clear()
        .env("HOME", home)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    // The process may not read its stdin at all.
    let _ = input.write_all(stdin.as_bytes());
    drop(input);
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn token_printed_on_one_machine_is_set_on_another() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let made = finetune(one.path(), &["token"], "");
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let secret = text(&made.stdout);
    let token = Token::parse(&secret).unwrap();
    let shown = token.fingerprint().to_string();
    assert_eq!(secret.lines().count(), 1);
    let said = text(&made.stderr);
    assert!(
        said.contains(&shown) && said.contains("made and kept in") && !said.contains(secret.trim()),
        "{said}"
    );
    let again = finetune(one.path(), &["token"], "");
    assert_eq!(text(&again.stdout), secret, "it is made once");

    let taken = finetune(two.path(), &["token", "--set"], &secret);
    let said = text(&taken.stdout);
    assert_eq!(taken.status.code(), Some(0), "{}", text(&taken.stderr));
    assert!(said.contains(&shown) && !said.contains(secret.trim()), "{said}");
    assert_eq!(text(&finetune(two.path(), &["token"], "").stdout), secret);
    let json = finetune(two.path(), &["token", "--json"], "");
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        (json["token"].as_str(), json["fingerprint"].as_str()),
        (Some(secret.trim()), Some(&shown[..]))
    );
}

/// Exit code and a part of the last line on stderr.
#[track_caller]
fn check(home: &Path, args: &[&str], stdin: &str, code: i32, expected: &str) {
    let out = finetune(home, args, stdin);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: ") && last.contains(expected), "{args:?}: {said}");
    assert!(stdin.trim().len() < 8 || !said.contains(stdin.trim()), "it repeats the secret: {said}");
}

#[test]
fn invalid_token_is_refused() {
    let home = tempfile::tempdir().unwrap();
    check(home.path(), &["token", "--set"], "", 78, "stdin: no token");
    check(home.path(), &["token", "--set"], "correct horse battery staple\n", 78, "64 hex digits");
    check(
        home.path(),
        &["token", "--set"],
        "hunter2hunter2\n",
        78,
        "112 bits at most, which could be guessed",
    );
    let damaged = Token::random().unwrap().text().replace("ft1-", "ft1-a");
    check(home.path(), &["token", "--set"], &damaged, 78, "checksum");
    let secret = Token::random().unwrap().text();
    check(home.path(), &["token", &secret], "", 2, "unexpected argument");
    check(home.path(), &["token", "--token", &secret], "", 2, "unknown option --token");
    assert!(!home.path().join(".config/finetune/token").exists(), "a bad token was kept");
}

#[cfg(unix)]
#[test]
fn token_file_readable_by_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let home = tempfile::tempdir().unwrap();
    finetune(home.path(), &["token"], "");
    let path = home.path().join(".config/finetune/token");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    check(home.path(), &["token"], "", 78, "others may read it (mode 644): chmod 600");
}
