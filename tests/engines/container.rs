//! recipes/Dockerfile: its program trains with the image's files, user, variables and work folder; with an engine, in
//! the image.

use crate::cli_fixture::Bench;
use crate::cluster::said;
use crate::image::{Image, Root, possible};
use std::path::Path;
use std::process::{Command, Output};

const DEMONSTRATION: [&str; 7] = ["demo", "--max-steps", "3", "--save-steps", "0", "-o", "/data/out"];

#[test]
fn files_of_the_image_alone_are_enough_to_train() {
    if !possible() {
        return;
    }
    let bench = Bench::new();
    let program = bench.command("").get_program().to_owned();
    let root = Root::new(bench.path("root"), Path::new(&program));
    root.own(&bench.path("data"));
    bench.file("hosts", "127.0.0.1 localhost\n");
    let run = |variables: &[(&str, &str)], words: &[&str]| -> Output {
        let mut command = root.container("", &bench.path("data"), &root.image.work);
        command.envs(variables.iter().copied()).args(words).output().unwrap()
    };
    let out = run(&[], &["--version"]);
    assert!(out.status.success() && said(&out).starts_with("finetune "), "{}", said(&out));
    // The image is a worker, and has no token yet.
    let out = run(&[], &["doctor"]);
    let text = said(&out);
    assert!(text.contains("can be written: /var/cache/finetune"), "{text}");
    assert!(text.contains("none on this machine"), "{text}");
    assert!(out.status.success(), "{text}");
    let out = run(&[("FINETUNE_ROLE", "single")], &DEMONSTRATION);
    assert!(out.status.success(), "{}", said(&out));
    bench.ok(&DEMONSTRATION.join(" ").replace("/data/out", "alone"));
    bench.same_adapter("alone", "data/out");
    // The work folder is the user's.
    let out = run(&[("FINETUNE_ROLE", "single")], &["demo", "--max-steps", "1"]);
    assert!(out.status.success(), "{}", said(&out));
}

/// An image of this test, removed at the end.
struct Built {
    engine: &'static str,
    name: String,
}

impl Built {
    /// The last stage on `base`, with this program in place of the one that the first stage builds.
    fn new(engine: &'static str, base: &str, bench: &Bench) -> Self {
        let image = Image::read();
        let text = image.text.replace("--from=build /finetune", "finetune");
        bench.file("context/Dockerfile", &format!("FROM {base}\n{text}"));
        std::fs::copy(bench.command("").get_program(), bench.path("context/finetune")).unwrap();
        let built = Built { engine, name: format!("finetune-test-{}", std::process::id()) };
        let context = bench.path("context").display().to_string();
        let out = built.engine(&["build", "-q", "--network", "host", "-t", &built.name, &context]);
        assert!(out.status.success(), "{}", said(&out));
        built
    }

    fn engine(&self, words: &[&str]) -> Output {
        Command::new(self.engine).args(words).output().unwrap()
    }

    fn run(&self, variable: &str, words: &[&str]) -> Output {
        let start = ["run", "--rm", "--network", "none", "-e", variable, &self.name];
        self.engine(&[&start, words].concat())
    }
}

impl Drop for Built {
    fn drop(&mut self) {
        self.engine(&["rmi", "-f", &self.name]);
    }
}

/// FINETUNE_CONTAINER_BASE names an image that is there, for machines that cannot pull one.
#[test]
fn image_is_built_and_started_by_an_engine() {
    let ok = |words: &[&str]| {
        Command::new(words[0]).args(&words[1..]).output().is_ok_and(|out| out.status.success())
    };
    let own = std::env::var("FINETUNE_CONTAINER_BASE").ok();
    let Some(engine) = ["docker", "podman"].into_iter().find(|name| ok(&[name, "info"])) else {
        assert!(own.is_none(), "FINETUNE_CONTAINER_BASE is set, and no engine answers");
        return println!("skipped: neither docker nor podman answers");
    };
    let base = own.clone().unwrap_or_else(|| Image::read().base);
    let able = || {
        ok(&["timeout", "300", engine, "pull", "-q", &base]) && ok(&[engine, "run", "--rm", &base, "true"])
    };
    if own.is_none() && !able() {
        return println!("skipped: {engine} cannot pull and start {base}");
    }
    let bench = Bench::new();
    let built = Built::new(engine, &base, &bench);
    let version = built.run("A=b", &["--version"]);
    assert!(said(&version).starts_with("finetune "), "{}", said(&version));
    let doctor = built.run("A=b", &["doctor"]);
    assert!(doctor.status.success(), "{}", said(&doctor));
    assert!(said(&doctor).contains("can be written: /var/cache/finetune"), "{}", said(&doctor));
    let out = built.run("FINETUNE_ROLE=single", &["demo", "--max-steps", "3"]);
    assert!(out.status.success() && said(&out).contains("3 of 3 steps"), "{}", said(&out));
}
