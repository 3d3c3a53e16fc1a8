//! Control groups of this machine, as engines make them for a job: the limits of a group above that of the process.

use crate::cli_fixture::Bench;
use crate::cluster::{launcher, said};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// A group with a limit, and a group without one in it. Both are removed at the end.
struct Group(PathBuf);

impl Group {
    /// `None` where none of version 1 with this controller can be made.
    fn new(controller: &str, limit: (&str, &str)) -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = own.lines().find_map(|line| {
            let (names, path) = line.split_once(':')?.1.split_once(':')?;
            names.split(',').any(|name| name == controller).then_some(path)
        })?;
        let group = Path::new("/sys/fs/cgroup").join(controller).join(path.trim_start_matches('/'));
        let group = Group(group.join(format!("finetune-{}", std::process::id())));
        std::fs::create_dir(&group.0).ok()?;
        std::fs::create_dir(group.0.join("task")).ok()?;
        std::fs::write(group.0.join(limit.0), limit.1).ok().map(|()| group)
    }

    /// The processor as `finetune devices` lists it in the inner group.
    fn processor(&self) -> Value {
        let bench = Bench::new();
        let enter = self.0.join("task/cgroup.procs");
        let words = format!("echo $$ > {} && exec \"$FINETUNE\" devices --json", enter.display());
        let out = launcher(&bench, &words).output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        let all: Value = serde_json::from_slice(&out.stdout).unwrap();
        let devices = all["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == "cpu").unwrap().clone()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for group in [self.0.join("task"), self.0.clone()] {
            let _ = std::fs::remove_dir(group);
        }
    }
}

#[test]
fn limits_of_real_control_groups_count() {
    let limit = 300 * MIB;
    match Group::new("memory", ("memory.limit_in_bytes", &limit.to_string())) {
        Some(group) => {
            let free = group.processor()["memory_free"].as_u64().unwrap();
            assert!((limit / 3..=limit).contains(&free), "{} MiB free", free / MIB);
        }
        None => println!("skipped: no group of memory can be made here"),
    }
    match Group::new("cpu", ("cpu.cfs_quota_us", "100000")) {
        Some(group) => assert_eq!(group.processor()["cores"], 1),
        None => println!("skipped: no group of processors can be made here"),
    }
}
