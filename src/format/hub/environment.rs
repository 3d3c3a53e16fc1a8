//! The variables of Python's `huggingface_hub`, and those that name a proxy.

use std::path::{Path, PathBuf};

/// The value of a variable; an empty one counts as absent.
pub(super) type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A variable of this process.
pub(super) fn variable(key: &str) -> Option<String> {
    std::env::var(key).ok().filter(|value| !value.is_empty())
}

/// Whether a variable is 1, true, yes or on.
pub(super) fn is_on(key: &str, var: Variables) -> bool {
    var(key).is_some_and(|v| matches!(v.to_lowercase().as_str(), "1" | "true" | "yes" | "on"))
}

/// The folder with `models--owner--name`.
pub(super) fn cache(var: Variables) -> PathBuf {
    let named = var("HF_HUB_CACHE").or_else(|| var("HUGGINGFACE_HUB_CACHE"));
    named.map_or_else(|| home(var).join("hub"), |path| expanded(&path))
}

/// The token of the environment, else the one that `hf auth login` wrote.
pub(super) fn token(var: Variables) -> Option<String> {
    if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN", var) {
        return None;
    }
    let clean = |text: String| Some(text.trim().to_owned()).filter(|token| !token.is_empty());
    let named = var("HF_TOKEN").or_else(|| var("HUGGING_FACE_HUB_TOKEN")).and_then(clean);
    named.or_else(|| {
        let path = var("HF_TOKEN_PATH").map_or_else(|| home(var).join("token"), |path| expanded(&path));
        std::fs::read_to_string(path).ok().and_then(clean)
    })
}

fn home(var: Variables) -> PathBuf {
    let caches = || var("XDG_CACHE_HOME").unwrap_or_else(|| "~/.cache".into());
    var("HF_HOME").map_or_else(|| expanded(&caches()).join("huggingface"), |path| expanded(&path))
}

/// `path` with the home folder in place of `~`.
fn expanded(path: &str) -> PathBuf {
    match (path.strip_prefix('~'), std::env::home_dir()) {
        (Some(""), Some(home)) => home,
        (Some(rest), Some(home)) if rest.starts_with(std::path::is_separator) => home.join(&rest[1..]),
        _ => Path::new(path).to_owned(),
    }
}

/// The proxy for `url`, of its scheme or of all, after the variable that names it; none for hosts and domains in NO_PROXY.
pub(super) fn proxy(url: &str, var: Variables) -> Option<(String, String)> {
    let named = |key: String| var(&key).map(|value| (key, value));
    let var = |key: &str| named(key.to_owned()).or_else(|| named(key.to_lowercase()));
    let (scheme, host) = (url.split(':').next()?, ureq::http::Uri::try_from(url).ok()?.host()?.to_owned());
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let inside = |domain: &str| {
        let domain = domain.trim();
        // An entry may name a port.
        let port = |(_, port): &(&str, &str)| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        let domain = match domain.rsplit_once(':').filter(port) {
            Some((name, _)) if !name.contains(':') || name.ends_with(']') => name,
            _ => domain,
        };
        let domain = domain.trim_start_matches('[').trim_end_matches(']');
        let domain = domain.trim_start_matches('*').trim_start_matches('.');
        host.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let proxy = var(&format!("{}_PROXY", scheme.to_uppercase())).or_else(|| var("ALL_PROXY"))?;
    let is_direct = |entry: &str| entry.trim() == "*" || (!entry.trim().is_empty() && inside(entry));
    (!var("NO_PROXY").is_some_and(|(_, list)| list.split(',').any(is_direct))).then_some(proxy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given<'a>(all: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |key| all.iter().find(|(name, _)| *name == key).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn cache_and_token_are_found_as_in_huggingface_hub() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        std::fs::write(folder.path().join("token"), "of the login\n").unwrap();
        std::fs::write(folder.path().join("other"), " of the path ").unwrap();
        let other = format!("{at}/other");
        let check = |all: &[(&str, &str)], place: &str, expected: Option<&str>| {
            let var = given(all);
            assert_eq!(cache(&var), Path::new(place), "{all:?}");
            assert_eq!(token(&var).as_deref(), expected, "{all:?}");
        };
        let hub = format!("{at}/hub");
        check(&[("HF_HOME", at)], &hub, Some("of the login"));
        check(&[("HF_HOME", at), ("HF_TOKEN_PATH", &other)], &hub, Some("of the path"));
        check(&[("HF_HOME", at), ("HF_TOKEN", "named\n")], &hub, Some("named"));
        check(&[("HF_HOME", at), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")], &hub, None);
        check(&[("XDG_CACHE_HOME", at)], &format!("{at}/huggingface/hub"), None);
        check(&[("HF_HOME", at), ("HF_HUB_CACHE", "/c"), ("HF_TOKEN", "t")], "/c", Some("t"));
        let home = std::env::home_dir().unwrap();
        check(&[("HF_HOME", "~/x"), ("HF_TOKEN", "t")], home.join("x/hub").to_str().unwrap(), Some("t"));
    }

    #[test]
    fn proxy_depends_on_scheme_and_host() {
        let all = [
            ("HTTPS_PROXY", "http://p:1"),
            ("http_proxy", "http://p:2"),
            ("NO_PROXY", "a.org, .b.org,10.0.0.1,localhost:8080,[::1]"),
        ];
        let var = given(&all);
        let check = |url: &str, expected: Option<&str>| {
            assert_eq!(proxy(url, &var).map(|p| p.1).as_deref(), expected, "{url}");
        };
        check("https://huggingface.co/x", Some("http://p:1"));
        check("http://huggingface.co:80/x", Some("http://p:2"));
        check("https://ba.org", Some("http://p:1"));
        for direct in [
            "https://a.org:443/x",
            "https://x.a.org",
            "https://b.org",
            "http://10.0.0.1:8080",
            "http://localhost:8080",
            "http://[::1]:9",
        ] {
            check(direct, None);
        }
        let all = [("ALL_PROXY", "socks5://p"), ("NO_PROXY", "")];
        let found = proxy("https://x", &given(&all));
        assert_eq!(found, Some(("ALL_PROXY".into(), "socks5://p".into())));
        let all = [("ALL_PROXY", "socks5://p"), ("no_proxy", "*")];
        assert_eq!(proxy("https://x", &given(&all)), None);
        assert_eq!(proxy("https://x", &given(&[])), None);
    }
}
