//! A hostile coordinator with the token against real workers over TLS: every kind of message before and after the
//! welcome, truncated, and with numbers at the limits of their types; and manifests with values that no run needs. Each
//! worker ends with a documented code and, unless the code is 0, one line that says why; it keeps its memory bounded,
//! prints no control characters, and writes nothing outside of its cache.

use crate::every_message::{self, at_the_edges, from_coordinator};
use crate::process::{Place, TOKEN};
use crate::script::{files, manifest};
use finetune::cluster::link::{decode, encode};
use finetune::cluster::message::{Bye, FRAME_LIMIT, Manifest, ModelFile, PIECE, ToCoordinator, ToWorker};
use finetune::net::{FrameReader, FrameWriter, Listener, Party, Security, Token};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// Upper bound on the time of any step here.
const PATIENCE: Duration = Duration::from_secs(60);
/// Twice the memory of a worker of the demonstration's model.
const ROOM: u64 = 400 << 20;
/// One in this many of the messages with a number at a limit is sent.
const STRIDE: usize = 29;

struct HostileCoordinator {
    runtime: Runtime,
    listener: Listener,
}

struct Talk<'a> {
    runtime: &'a Runtime,
    reader: FrameReader,
    writer: FrameWriter,
}

impl HostileCoordinator {
    fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let security = Security::with_token(Party::Coordinator, &Token::parse(TOKEN).unwrap()).unwrap();
        let at = "127.0.0.1:0".parse().unwrap();
        let listener = runtime.block_on(Listener::bind(&at, security, |_| ())).unwrap();
        HostileCoordinator { runtime, listener }
    }

    /// The next connection within that time.
    fn meets(&mut self, patience: Duration) -> Option<Talk<'_>> {
        let accepted = self.runtime.block_on(async { timeout(patience, self.listener.accept()).await });
        let (reader, writer) = accepted.ok()?.unwrap().split(FRAME_LIMIT);
        Some(Talk { runtime: &self.runtime, reader, writer })
    }
}

impl Talk<'_> {
    fn send(&mut self, frame: &[u8]) {
        // The worker may have disconnected.
        let _ = self.runtime.block_on(async { timeout(PATIENCE, self.writer.send(frame)).await });
    }

    fn say(&mut self, message: &ToWorker) {
        self.send(&encode(message).unwrap().whole());
    }

    fn hear(&mut self) -> Option<ToCoordinator> {
        let next = self.runtime.block_on(async { timeout(PATIENCE, self.reader.next()).await });
        Some(decode(&next.expect("the worker says something").ok()?).unwrap())
    }

    /// Proceeds to a worker that waits for leases.
    fn welcomes(&mut self, manifest: Manifest) {
        self.say(&ToWorker::Welcome(Box::new(manifest)));
        loop {
            match self.hear() {
                Some(ToCoordinator::Fetch { file, offset, len }) => {
                    let bytes = &files()[file as usize].1;
                    for at in (offset..offset + len).step_by(PIECE) {
                        let end = (at + PIECE as u64).min(offset + len);
                        let bytes = bytes[at as usize..end as usize].to_vec().into();
                        self.say(&ToWorker::Piece { file, offset: at, bytes });
                    }
                }
                Some(ToCoordinator::Measured { .. }) | None => return,
                Some(_) => {}
            }
        }
    }
}

struct Case {
    what: String,
    welcomed: bool,
    frames: Vec<Vec<u8>>,
}

/// Manifests with values that no run needs.
fn manifests() -> Vec<(String, Manifest)> {
    let named = |name: &str| ModelFile { name: name.into(), size: 5, hash: [0; 32] };
    let mut all: Vec<(String, Manifest)> = Vec::new();
    let mut with = |what: &str, change: &dyn Fn(&mut Manifest)| {
        let mut made = manifest();
        change(&mut made);
        all.push((what.into(), made));
    };
    for name in ["../evil", "/evil", "..", ".", "", "a/b", "a\\b", "a\0b", "\u{1b}[2J", "-rf"] {
        with(&format!("a file {name:?}"), &|m| m.files.insert(0, named(name)));
    }
    for hash in ["../evil", "", ".", "/evil", "x.lock"] {
        with(&format!("a model {hash:?}"), &|m| m.model_hash = hash.into());
    }
    with("a name with an escape", &|m| {
        (m.name, m.run) = ("\u{1b}[2J\u{202e}\nerror: x".into(), "\u{1b}]0;x\u{7}".into())
    });
    with("files twice", &|m| m.files.extend(m.files.clone()));
    with("huge files", &|m| m.files[0].size = u64::MAX);
    with("no files", &|m| (m.files, m.model_hash) = (vec![], "abc".into()));
    with("rank 0", &|m| m.lora.rank = 0);
    with("a huge rank", &|m| m.lora.rank = usize::MAX);
    with("a scale that is no number", &|m| m.lora.alpha = f32::NAN);
    with("a dropout of 2", &|m| m.lora.dropout = 2.0);
    with("no targets", &|m| m.lora.targets.clear());
    with("many parameters", &|m| m.parameters = u64::MAX);
    with("long microbatches", &|m| m.tokens = u64::MAX);
    with("many labels", &|m| m.labels = Some(vec!["\u{1b}[2J".into(); 100_000]));
    with("no labels", &|m| m.labels = Some(vec![]));
    with("a type", &|m| m.dtype = Some("\u{1b}[2J".into()));
    with("a recipe", &|m| m.quantize = Some("\u{1b}[2J".into()));
    all
}

fn cases() -> Vec<Case> {
    let (mut cases, mut edges) = (Vec::new(), 0);
    let framed = |message: &ToWorker| encode(message).unwrap().whole().to_vec();
    for (what, manifest) in manifests() {
        let frames = vec![framed(&ToWorker::Welcome(Box::new(manifest)))];
        cases.push(Case { what, welcomed: false, frames });
    }
    for message in from_coordinator() {
        let frame = framed(&message);
        for welcomed in [false, true] {
            let mut case = |what: &str, frames| {
                cases.push(Case { what: format!("{what} {message:?}"), welcomed, frames })
            };
            case("said", vec![frame.clone()]);
            if !welcomed {
                case("cut short", vec![frame[..frame.len() / 2].to_vec()]);
                case("said again and again", vec![frame.clone(); 50]);
            }
            for bytes in at_the_edges(&message) {
                edges += 1;
                if edges % STRIDE == 0 {
                    case("at an edge", vec![bytes.to_vec()]);
                }
            }
        }
    }
    // Inconsistent leases, for a worker that has its parameters.
    let lease = |change: &dyn Fn(&mut finetune::model::stage::Microbatch)| {
        let mut microbatch = every_message::microbatch();
        change(&mut microbatch);
        let work = finetune::cluster::message::Work::Train(microbatch);
        let lease = finetune::cluster::message::Lease { lease: 1, device: 0, after: 0, of: 2, work };
        vec![framed(&ToWorker::Lease(Box::new(lease)))]
    };
    let mut broken = |what: &str, frames| cases.push(Case { what: what.into(), welcomed: true, frames });
    broken("no bounds", lease(&|m| m.bounds.clear()));
    broken("bounds in reverse", lease(&|m| m.bounds.reverse()));
    broken("bounds outside", lease(&|m| m.bounds[2] = u32::MAX));
    broken("more rows", lease(&|m| m.rows = vec![1; 500]));
    broken("no tokens", lease(&|m| m.ids.clear()));
    broken("ids outside", lease(&|m| m.ids[0] = u32::MAX));
    broken("few targets", lease(&|m| m.targets = finetune::model::stage::Targets::Tokens(vec![])));
    broken("a step at the end", lease(&|m| m.step = u64::MAX));
    cases
}

/// Sends the frames of a case to one worker; however often it reconnects, it then receives the end of the run.
fn check(place: &Place, number: usize, case: &Case) {
    let mut liar = HostileCoordinator::new();
    let at = liar.listener.address();
    let line = format!(
        "--role worker --coordinator {at} --threads 1 --gpus cpu --join-timeout 20s --model-cache cache"
    );
    let mut worker = place.start(&format!("worker-{number}"), &line);
    let fail = |why: &str, said: String| panic!("{}: {why}\n{said}", case.what);
    let (mut most, began) = (0, Instant::now());
    {
        let Some(mut talk) = liar.meets(PATIENCE) else { return fail("it does not come", worker.said()) };
        talk.hear();
        if case.welcomed {
            talk.welcomes(manifest());
        }
        case.frames.iter().for_each(|frame| talk.send(frame));
        talk.say(&ToWorker::Bye(Bye::Done));
        while let Some(now) = worker.most() {
            most = most.max(now);
            if timeout_of(&mut talk).is_none() || began.elapsed() > PATIENCE {
                break;
            }
        }
    }
    while let Some(now) = worker.most() {
        most = most.max(now);
        if let Some(mut talk) = liar.meets(Duration::from_millis(20)) {
            talk.say(&ToWorker::Bye(Bye::Done));
            while timeout_of(&mut talk).is_some() {}
        }
        if began.elapsed() > PATIENCE {
            return fail("it does not end", worker.said());
        }
    }
    let ((code, last), said) = (worker.ends(), worker.said());
    if ![0, 1, 3, 75, 78].contains(&code) || (code != 0 && !last.starts_with("error: ")) {
        return fail(&format!("code {code}"), said);
    }
    if said.contains("internal error") || said.contains("panicked") || most > ROOM {
        return fail(&format!("{most} bytes at most"), said);
    }
    if said.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t')) || said.contains("\nerror: x") {
        fail("it obeys a coordinator's text", said);
    }
}

/// Reads for a moment; `None` at the end of the connection.
fn timeout_of(talk: &mut Talk<'_>) -> Option<()> {
    let next = talk.runtime.block_on(async { timeout(Duration::from_millis(50), talk.reader.next()).await });
    next.is_err().then_some(()).or_else(|| next.ok()?.ok().map(drop))
}

#[test]
fn hostile_coordinator_cannot_harm_a_worker() {
    let place = Place::new();
    // Fills the cache.
    check(&place, 0, &Case { what: "nothing".into(), welcomed: true, frames: vec![] });
    let cases = cases();
    println!("{} cases", cases.len());
    let next = Mutex::new(cases.iter().enumerate());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let taken = next.lock().unwrap().next();
                    let Some((index, case)) = taken else { return };
                    check(&place, index + 1, case);
                }
            });
        }
    });
    let outside: Vec<_> =
        std::fs::read_dir(place.path("")).unwrap().flatten().map(|e| e.file_name()).collect();
    let strange = |name: &&std::ffi::OsString| !name.to_string_lossy().ends_with(".log") && *name != "cache";
    assert_eq!(outside.iter().find(strange), None, "{outside:?}");
}
