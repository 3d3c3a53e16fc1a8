//! Nothing is sent from the machine: neither a displayed page nor a training process requests anything elsewhere. Both
//! tests detect a planted request, which shows that they can fail.

use crate::chromium;
use crate::cli_fixture::Bench;
use std::collections::BTreeSet;
use std::process::{Command, Stdio};

/// Requests of the browser to its vendor, whatever it shows: accounts, time, updates. Exact names: a page that loads a
/// font from another host of the vendor is detected.
const VENDOR_HOSTS: [&str; 6] = [
    "accounts.google.com",
    "clients2.google.com",
    "update.googleapis.com",
    "redirector.gvt1.com",
    "optimizationguide-pa.googleapis.com",
    "content-autofill.googleapis.com",
];

/// The document after its scripts ran, and the requests made for it: host, port and path.
pub fn shown(bench: &Bench, address: &str) -> Option<(String, BTreeSet<String>)> {
    let log = bench.path("net.json");
    let dump = format!("--log-net-log={}", log.display());
    let shown = chromium(&["--dump-dom", "--timeout=60000", &dump, address])?;
    let asked = std::fs::read_to_string(&log).unwrap();
    assert!(asked.contains("\"constants\""), "the browser wrote no log");
    let urls = asked.split("\"url\":\"").skip(1).filter_map(|rest| rest.split('"').next());
    let urls = urls.filter_map(|url| url.split_once("://").filter(|(scheme, _)| scheme.starts_with("http")));
    let host = |rest: &str| rest.split(['/', ':', '?']).next().unwrap_or_default().to_string();
    let strangers = urls.map(|(_, rest)| rest).filter(|rest| !VENDOR_HOSTS.contains(&host(rest).as_str()));
    let strangers = strangers.map(|rest| rest.split('?').next().unwrap_or_default().to_string()).collect();
    Some((String::from_utf8_lossy(&shown.stdout).into_owned(), strangers))
}

#[test]
fn remote_font_is_detected() {
    let bench = Bench::new();
    let planted = r#"<!doctype html><style>@font-face{font-family:x;src:url(https://fonts.googleapis.com/x)}p{font-family:x}</style><p>x"#;
    let address = format!("file://{}", bench.file("planted.html", planted).display());
    let Some((_, asked)) = shown(&bench, &address) else { return };
    assert_eq!(asked, BTreeSet::from(["fonts.googleapis.com/x".to_string()]));
}

/// Runs in a separate network, in which every packet goes through one interface that counts packets.
const ISOLATED: &str = r#"
ip link set lo up && ip address add 192.0.2.1/32 dev lo && ip route add default dev lo src 192.0.2.1 || exit 9
sent() { awk '$1 == "lo:" { print $11 }' /proc/net/dev; }
"$@" || exit 8
echo "by the run: $(sent)"
echo x > /dev/udp/198.51.100.1/53
echo "planted: $(sent)"
"#;

#[test]
fn a_training_process_sends_no_packet() {
    let bench = Bench::new();
    let run = bench.command(
        "demo --data rows.jsonl --max-steps 2 --batch-size 4 --gpus 0,1 --gpu-backend cpu --dashboard=127.0.0.1:0 -o out",
    );
    let mut alone = Command::new("unshare");
    alone.args(["-n", "bash", "-c", ISOLATED, "run"]).arg(run.get_program()).args(run.get_args());
    for (name, value) in run.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        alone.env(name, value);
    }
    let output = alone.current_dir(bench.path("")).stdin(Stdio::null()).output();
    let Ok(output) = output else { return eprintln!("skipped: no unshare") };
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !matches!(output.status.code(), Some(0 | 8)) {
        return eprintln!("skipped: no network of its own ({})", why.lines().next().unwrap_or_default());
    }
    assert!(output.status.success(), "{why}");
    assert_eq!(said.lines().collect::<Vec<_>>(), ["by the run: 0", "planted: 1"], "{why}");
}
