//! Requests to the Hub. They follow redirects to the hosts that store large files, and send the token to the Hub only.
//! A storage of chunks (Xet) answers as any other one: its bridge serves whole files and ranges of them.

use super::environment;
use serde_json::Value;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::time::Duration;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderName, LOCATION, RANGE};
use ureq::http::{Method, Request, Response, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, AsSendBody, Body, SendBody, Timeout};

/// The header of a request with JSON.
pub(super) const JSON: &[(HeaderName, &str)] = &[(CONTENT_TYPE, "application/json")];
/// Time limit for resolving a name, and for a connection with its TLS handshake.
const CONNECT: Duration = Duration::from_secs(10);
/// Maximum number of redirects of a request.
const MOST_REDIRECTS: usize = 10;
/// Maximum size of an answer in JSON.
const MOST_JSON_BYTES: u64 = 64 << 20;
/// Maximum size of the explanation of a refusal.
const MOST_REASON_BYTES: u64 = 1 << 16;
/// An answer to bytes may take this many times longer: when the last one is written, some are still on their way, and the
/// Hub may have to join or to read a large file.
const LONGER: u32 = 4;

/// Why a request gave no usable answer.
pub(super) enum Failure {
    /// No connection: where to, and why.
    Unreachable(String, String),
    /// No data within the time limit.
    Stalled,
    /// The status of an answer other than success, the Hub's code of the error, and a description.
    Refused(u16, Option<String>, String),
    /// The status of another host's answer, and a description.
    Elsewhere(u16, String),
    /// The connection ended early, or the answer is malformed.
    Broken(String),
}

impl Failure {
    /// Whether the same request may succeed a moment later.
    pub fn passes(&self) -> bool {
        match self {
            Failure::Unreachable(..) | Failure::Stalled | Failure::Broken(_) => true,
            Failure::Refused(status, ..) | Failure::Elsewhere(status, _) => *status == 429 || *status >= 500,
        }
    }
}

/// The content of a request.
enum Payload<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// Bytes of a file, and a function that gets the number of those that are sent.
    Part(&'a File, Range<u64>, &'a mut dyn FnMut(u64)),
}

/// A connection to one Hub.
pub(super) struct Client {
    agent: Agent,
    hub: String,
    token: Option<String>,
    patience: Duration,
    /// Whether SSL_CERT_FILE or SSL_CERT_DIR was set without any certificate in it.
    no_certificates: bool,
}

impl Client {
    pub fn new(endpoint: &str, token: Option<String>, patience: Duration) -> Self {
        let mut config = Agent::config_builder()
            .user_agent(concat!("finetune/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .http_status_as_error(false)
            // Redirects are followed below: a client of its own would send the token to another port of the Hub's host.
            .max_redirects(0)
            .proxy(None)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_per_write(Some(patience));
        // The system's certificates, or SSL_CERT_FILE; a system without any uses those of Mozilla, compiled in.
        let system = rustls_native_certs::load_native_certs().certs;
        if !system.is_empty() {
            let roots = system.iter().map(|c| Certificate::from_der(c).to_owned()).collect::<Vec<_>>();
            let roots = RootCerts::Specific(roots.into());
            config = config.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|key| environment::variable(key).is_some());
        let (agent, hub) = (config.build().into(), endpoint.trim_end_matches('/').to_owned());
        Client { agent, hub, token, patience, no_certificates: named && system.is_empty() }
    }

    /// The address of the Hub, without a slash at its end.
    pub fn hub(&self) -> &str {
        &self.hub
    }

    /// The JSON at `path`.
    pub fn get_json(&self, path: &str) -> Result<Value, Failure> {
        parsed(&whole(self.send(Method::GET, path, &[], Payload::Nothing)?)?)
    }

    /// The JSON that answers `body` at `path`.
    pub fn post_json(
        &self,
        path: &str,
        headers: &[(HeaderName, &str)],
        body: &Value,
    ) -> Result<Value, Failure> {
        parsed(&self.post(path, headers, body.to_string().as_bytes())?)
    }

    /// The answer to these bytes at `url`, which is a path of the Hub or a whole address.
    pub fn post(&self, url: &str, headers: &[(HeaderName, &str)], body: &[u8]) -> Result<Vec<u8>, Failure> {
        whole(self.send(Method::POST, url, headers, Payload::Bytes(body))?)
    }

    /// Stores bytes of `file` at an address, and returns the tag that the storage gives them. `sent` gets the number of
    /// bytes that are sent.
    pub fn put(
        &self,
        url: &str,
        (file, range): (&File, Range<u64>),
        sent: &mut dyn FnMut(u64),
    ) -> Result<Option<String>, Failure> {
        let answer = self.send(Method::PUT, url, &[], Payload::Part(file, range, sent))?;
        Ok(header(&answer, ETAG.as_str()))
    }

    /// The content at `path`, or a range of it; true if the answer begins where the range does.
    pub fn content(
        &self,
        path: &str,
        range: Option<Range<u64>>,
    ) -> Result<(bool, impl io::Read + use<>), Failure> {
        let value = range.as_ref().map(|r| format!("bytes={}-{}", r.start, r.end.saturating_sub(1)));
        let header = value.as_deref().map(|value| (RANGE, value));
        let answer = self.send(Method::GET, path, header.as_slice(), Payload::Nothing)?;
        let exact = range.is_none_or(|r| r.start == 0) || answer.status() == 206;
        Ok((exact, answer.into_body().into_reader()))
    }

    /// Sends a request to the Hub or to another address, and to where the answer refers.
    fn send(
        &self,
        method: Method,
        url: &str,
        headers: &[(HeaderName, &str)],
        mut payload: Payload,
    ) -> Result<Response<Body>, Failure> {
        let mut url = if url.starts_with('/') { format!("{}{url}", self.hub) } else { url.to_owned() };
        for _ in 0..=MOST_REDIRECTS {
            let answer = self.once(method.clone(), &url, headers, &mut payload)?;
            let at = origin(&url);
            match header(&answer, LOCATION.as_str()).filter(|_| answer.status().is_redirection()) {
                Some(location) => url = redirected(&url, &location),
                None if answer.status().is_success() => return Ok(answer),
                // The Hub itself, perhaps under another name.
                None if at == origin(&self.hub) || header(&answer, "x-error-code").is_some() => {
                    return Err(refused(answer));
                }
                // The Hub's reasons for a refusal do not apply to a host that stores files.
                None => {
                    let what = format!("{at} answers {}", answer.status());
                    return Err(Failure::Elsewhere(answer.status().as_u16(), what));
                }
            }
        }
        Err(Failure::Broken(format!(
            "more than {MOST_REDIRECTS} redirects, the last one to {}",
            origin(&url)
        )))
    }

    /// Sends a request to one address.
    fn once(
        &self,
        method: Method,
        url: &str,
        headers: &[(HeaderName, &str)],
        payload: &mut Payload,
    ) -> Result<Response<Body>, Failure> {
        let at = origin(url).to_owned();
        let lost = |why: String| Failure::Unreachable(at.clone(), why);
        if self.no_certificates && url.starts_with("https:") {
            return Err(lost("SSL_CERT_FILE or SSL_CERT_DIR names no certificates".into()));
        }
        let uri: Uri = url.parse().map_err(|_| lost("this is not an http address".into()))?;
        let mut request = Request::builder().uri(uri).method(method);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        if let Some(token) = self.token.as_ref().filter(|_| at == origin(&self.hub)) {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut patience = self.patience;
        let (mut nothing, mut bytes, mut reader);
        let body = match payload {
            Payload::Nothing => {
                nothing = ();
                nothing.as_body()
            }
            Payload::Bytes(all) => {
                patience *= LONGER;
                bytes = *all;
                bytes.as_body()
            }
            Payload::Part(file, range, sent) => {
                patience *= LONGER;
                // Storages take no content of unknown length.
                request = request.header(CONTENT_LENGTH, range.end - range.start);
                reader = Part::new(file, range.clone(), &mut **sent)?;
                SendBody::from_reader(&mut reader)
            }
        };
        let request = request.body(body).map_err(|e| Failure::Broken(e.to_string()))?;
        // The limit of a read applies to the first read of an answer too.
        let request = self.agent.configure_request(request).timeout_recv_response(Some(patience));
        let mut request = request.timeout_per_read(Some(patience));
        if let Some((variable, proxy)) = environment::proxy(url, &environment::variable) {
            let proxy = ureq::Proxy::new(&proxy).map_err(|e| lost(format!("{variable}: {e}")))?;
            request = request.proxy(Some(proxy));
        }
        self.agent.run(request.build()).map_err(|e| match Failure::from(e) {
            Failure::Broken(why) => lost(why),
            other => other,
        })
    }
}

/// Reads a range of a file. A file that ends in it is an error.
struct Part<'a> {
    file: &'a File,
    left: u64,
    done: u64,
    sent: &'a mut dyn FnMut(u64),
}

impl<'a> Part<'a> {
    fn new(mut file: &'a File, range: Range<u64>, sent: &'a mut dyn FnMut(u64)) -> io::Result<Self> {
        file.seek(io::SeekFrom::Start(range.start))?;
        Ok(Part { file, left: range.end - range.start, done: 0, sent })
    }
}

impl Read for Part<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = self.left.min(into.len() as u64) as usize;
        let n = self.file.read(&mut into[..most])?;
        if n == 0 && most > 0 {
            return Err(io::Error::other("the file became shorter while it was sent"));
        }
        (self.left, self.done) = (self.left - n as u64, self.done + n as u64);
        (self.sent)(self.done);
        Ok(n)
    }
}

impl From<ureq::Error> for Failure {
    fn from(e: ureq::Error) -> Self {
        match e {
            ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => Failure::Broken("no answer".into()),
            ureq::Error::Timeout(_) => Failure::Stalled,
            ureq::Error::Io(e) => Failure::Broken(e.to_string()),
            e => Failure::Broken(e.to_string()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        ureq::Error::from(e).into()
    }
}

fn header(answer: &Response<Body>, name: &str) -> Option<String> {
    answer.headers().get(name)?.to_str().ok().map(str::to_owned)
}

/// The whole content of an answer, which is not that of a file.
fn whole(answer: Response<Body>) -> Result<Vec<u8>, Failure> {
    let bytes = answer.into_body().into_with_config().limit(MOST_JSON_BYTES).read_to_vec();
    bytes.map_err(Failure::from)
}

/// The JSON of an answer.
pub(super) fn parsed(bytes: &[u8]) -> Result<Value, Failure> {
    serde_json::from_slice(bytes).map_err(|e| Failure::Broken(format!("the answer is not JSON: {e}")))
}

fn refused(answer: Response<Body>) -> Failure {
    let (status, code) = (answer.status(), header(&answer, "x-error-code"));
    let why = header(&answer, "x-error-message").or_else(|| reasons(answer));
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    Failure::Refused(status.as_u16(), code, format!("the Hub answers {status}{why}"))
}

/// The reasons in the content of a refusal: `error`, or the messages of `errors`.
fn reasons(answer: Response<Body>) -> Option<String> {
    let bytes = answer.into_body().into_with_config().limit(MOST_REASON_BYTES).read_to_vec().ok()?;
    let said: Value = serde_json::from_slice(&bytes).ok()?;
    let all = said["errors"].as_array().into_iter().flatten().map(|error| &error["message"]);
    let all: Vec<&str> = all.chain([&said["error"]]).filter_map(Value::as_str).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// `scheme://host:port` of an URL.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    &url[..url[host..].find(['/', '?', '#']).map_or(url.len(), |end| host + end)]
}

/// The URL that `location` names in an answer from `url`.
fn redirected(url: &str, location: &str) -> String {
    let location = location.split('#').next().unwrap_or_default();
    if location.starts_with("//") {
        format!("{}:{location}", url.split(':').next().unwrap_or_default())
    } else if location.starts_with('/') {
        format!("{}{location}", origin(url))
    } else if location.contains("://") {
        location.to_owned()
    } else {
        let path = url.split('?').next().unwrap_or(url);
        format!("{}/{location}", path.rsplit_once('/').map_or(path, |(folder, _)| folder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_like_links() {
        let check = |location: &str, expected: &str| {
            assert_eq!(redirected("https://hub:8443/a/b?c=/d", location), expected, "{location}");
        };
        check("https://cdn/x?sign=https://y", "https://cdn/x?sign=https://y");
        check("//cdn/x", "https://cdn/x");
        check("/x/y?z", "https://hub:8443/x/y?z");
        check("x#part", "https://hub:8443/a/x");
    }

    #[test]
    fn origin_is_scheme_host_and_port() {
        let check = |url: &str, expected: &str| assert_eq!(origin(url), expected);
        check("https://hub/a://b", "https://hub");
        check("http://hub:80?x", "http://hub:80");
        check("http://hub", "http://hub");
        check("hub/a", "hub");
    }
}
