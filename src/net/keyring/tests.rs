use super::*;
use std::os::unix::fs::PermissionsExt;

impl Keyring {
    /// One with nothing but a user's own file, or not even that.
    pub fn alone(own: Option<PathBuf>) -> Self {
        Keyring { named: None, variable: None, own }
    }
}

fn named(path: &Path) -> Keyring {
    Keyring { named: Some(path.into()), variable: None, own: None }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn token_is_made_once_and_replaced_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/token");
    let keyring = named(&path);
    assert!(matches!(keyring.find_or_make(), Err(KeepError::Missing(_))), "what was named should be there");
    let first = keyring.find_or_make_there().unwrap();
    assert!(first.made);
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    let second = keyring.find_or_make().unwrap();
    assert!(!second.made);
    assert_eq!(second.token.text(), first.token.text());
    let third = Token::random().unwrap();
    let before = path.with_file_name("token.before-1");
    assert_eq!(keyring.keep(&third).unwrap(), (path.clone(), Some(before.clone())));
    assert_eq!(keyring.find().unwrap().unwrap().token.text(), third.text());
    assert_eq!((fs::read_to_string(&before).unwrap().trim(), mode(&before)), (&*first.token.text(), 0o600));
    assert_eq!(keyring.keep(&third).unwrap().1, None, "the same token again replaces nothing");
    let again = keyring.keep(&first.token).unwrap().1.unwrap();
    assert_eq!(fs::read_to_string(again).unwrap().trim(), third.text());
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 3, "a draft was left");
}

#[test]
fn slower_process_uses_the_existing_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let first = Keyring::alone(Some(path.clone())).find_or_make().unwrap().token.text();
    assert!(!write(&Token::random().unwrap(), &path, Instead::Keep).unwrap(), "it never replaces");
    // As somebody who looked before it was there.
    let second = Keyring::alone(Some(path)).make().unwrap();
    assert_eq!((second.token.text(), second.made), (first, false));
}

#[test]
fn named_token_file_has_precedence() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let [file, variable, own] = [(); 3].map(|()| Token::random().unwrap().text());
    fs::write(path("file"), &file).unwrap();
    fs::write(path("own"), &own).unwrap();
    for name in ["file", "own"] {
        fs::set_permissions(path(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let all = Keyring { named: Some(path("file")), variable: Some(variable.clone()), own: Some(path("own")) };
    let text = |k: &Keyring| k.find().unwrap().unwrap().token.text();
    assert_eq!(text(&all), file);
    let two = Keyring { named: None, ..all };
    assert_eq!(text(&two), variable);
    let bad = Keyring { variable: Some("hunter2".into()), ..two.clone() };
    assert!(bad.find().unwrap_err().to_string().starts_with("FINETUNE_TOKEN: that is no token: 56 bits"));
    assert_eq!(text(&Keyring { variable: None, ..two }), own);
}

/// The line for a file of that text and mode.
fn check(text: &str, bits: u32, expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
    let line = named(&path).find().unwrap_err().to_string();
    let expected = expected.replace("PATH", &path.display().to_string());
    assert!(line.contains(&expected), "{line}");
    assert!(text.len() < 8 || !line.contains(text), "the secret is repeated: {line}");
}

#[test]
fn readable_or_invalid_token_files_are_refused() {
    let token = Token::random().unwrap().text();
    for bits in [0o644, 0o640, 0o660, 0o604, 0o666, 0o610] {
        check(&token, bits, &format!("PATH: others may read it (mode {bits:03o}): chmod 600 PATH"));
    }
    check("hunter2hunter2", 0o600, "PATH: not a token: 112 bits at most");
    check("", 0o600, "PATH: not a token");
    check(&"x".repeat(100_000), 0o600, "PATH: not a token");
    let absent = Path::new("no/such/token");
    let line = named(absent).find().unwrap_err().to_string();
    assert_eq!(line, "no/such/token: no such file: `finetune token --token-file no/such/token` makes it");
}

#[test]
fn own_token_file_follows_home_and_xdg() {
    let of =
        |set: &[(&str, &str)]| own_file(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()));
    assert_eq!(of(&[("HOME", "/h")]), Some("/h/.config/finetune/token".into()));
    assert_eq!(of(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")]), Some("/x/finetune/token".into()));
    assert_eq!(of(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "x")]), Some("/h/.config/finetune/token".into()));
    assert_eq!(of(&[]), None);
}
