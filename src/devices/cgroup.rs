//! Memory that the control groups of this process leave: every group from its own one up has a limit. Groups of version
//! 1 and 2 are found through the mounts, because engines put a process anywhere in the tree, and containers mount a
//! part of it.

use std::fs::read_to_string;
use std::path::Path;

/// Files of a group: its limits, its usage, and the statistics with the part of the usage that is cached files, under a
/// name. The system frees cached files when memory is needed.
struct Files {
    limits: &'static [&'static str],
    usage: &'static str,
    cached: &'static str,
}

const VERSION_1: Files = Files {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cached: "total_inactive_file",
};
const VERSION_2: Files =
    Files { limits: &["memory.max", "memory.high"], usage: "memory.current", cached: "inactive_file" };

/// Free bytes under all limits, `None` if there is no limit. `root` is `/`, or that of a test.
pub fn free(root: &Path) -> Option<u64> {
    let groups = read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let own = |version: &Files, of: &dyn Fn(&str, &str) -> bool, kind: &str, option: &str| {
        let (_, path) = groups.lines().filter_map(split).find(|(controllers, _)| of(controllers, option))?;
        let (top, mounted) = mounts.lines().find_map(|line| mount(line, kind, option))?;
        let top = root.join(top.trim_start_matches('/'));
        // A container sees its own group as the mount's root, or the path of the machine, which is not mounted.
        let below = Path::new(path).strip_prefix(mounted).unwrap_or(Path::new(""));
        let group = Some(top.join(below)).filter(|group| group.is_dir()).unwrap_or(top.clone());
        group.ancestors().take_while(|dir| dir.starts_with(&top)).filter_map(|dir| version.left(dir)).min()
    };
    let first =
        own(&VERSION_1, &|controllers, one| controllers.split(',').any(|c| c == one), "cgroup", "memory");
    let second = own(&VERSION_2, &|controllers, _| controllers.is_empty(), "cgroup2", "");
    first.into_iter().chain(second).min()
}

/// The controllers and the path of a line of /proc/self/cgroup.
fn split(line: &str) -> Option<(&str, &str)> {
    line.split_once(':')?.1.split_once(':')
}

/// The place of a mount of this kind and option, and the group that is mounted there.
fn mount<'a>(line: &'a str, kind: &str, option: &str) -> Option<(&'a str, &'a str)> {
    let (place, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let options = (system.next() == Some(kind)).then(|| system.nth(1))??;
    (option.is_empty() || options.split(',').any(|o| o == option)).then_some(())?;
    let mut place = place.split(' ').skip(3);
    let mounted = place.next()?;
    Some((place.next()?, mounted))
}

impl Files {
    /// What the limits of a group leave.
    fn left(&self, group: &Path) -> Option<u64> {
        let number = |name: &str| read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let limit = self.limits.iter().filter_map(|name| number(name)).min()?;
        let statistics = read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = statistics.lines().find_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            bytes.trim().parse::<u64>().ok().filter(|_| name == self.cached)
        });
        let used = number(self.usage).unwrap_or(0).saturating_sub(cached.unwrap_or(0));
        Some(limit.saturating_sub(used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A tree of files: (path, contents).
    fn check(files: &[(&str, &str)], expected: Option<u64>) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(free(dir.path()), expected.map(|mib| mib * MIB), "{files:?}");
    }

    fn mib(count: u64) -> String {
        (count * MIB).to_string()
    }

    #[test]
    fn the_narrowest_group_of_version_2_counts() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let groups = "0::/system.slice/slurmstepd.scope/job_812/step_0/task_0\n";
        let job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_812";
        let own = format!("{job}/step_0/task_0/memory.max");
        let (max, used, stat) =
            (format!("{job}/memory.max"), format!("{job}/memory.current"), format!("{job}/memory.stat"));
        let (limit, current) = (mib(2048), mib(800));
        let cached = format!("anon 5\ninactive_file {}\nactive_file 7\n", mib(300));
        let mut files = vec![
            ("proc/self/mountinfo", mounts),
            ("proc/self/cgroup", groups),
            (&own, "max\n"),
            (&max, &limit),
            (&used, &current),
            (&stat, &cached),
        ];
        check(&files, Some(2048 - 800 + 300));
        // A softer limit, and a lower one further up.
        let (high, above, slice) =
            (format!("{job}/memory.high"), mib(1024), "sys/fs/cgroup/system.slice/memory.max");
        files.push((&high, &above));
        check(&files, Some(1024 - 800 + 300));
        let narrow = mib(100);
        files.push((slice, &narrow));
        check(&files, Some(100));
    }

    #[test]
    fn groups_of_version_1_are_found_beside_version_2() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let groups = "5:cpu,cpuacct:/\n4:memory:/slurm/uid_1000/job_7/step_0\n0::/\n";
        let unlimited = "9223372036854771712\n";
        let (limit, usage) = (mib(512), mib(112));
        let statistics = format!("cache 1\ninactive_file 1\ntotal_inactive_file {}\n", mib(12));
        let base = "sys/fs/cgroup/memory/slurm/uid_1000/job_7";
        let names =
            ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "step_0/memory.limit_in_bytes"];
        let [max, used, stat, own] = names.map(|name| format!("{base}/{name}"));
        check(
            &[
                ("proc/self/mountinfo", mounts),
                ("proc/self/cgroup", groups),
                (&max, &limit),
                (&used, &usage),
                (&stat, &statistics),
                (&own, unlimited),
            ],
            Some(512 - 112 + 12),
        );
    }

    #[test]
    fn the_group_of_a_container_is_the_root_of_its_mount() {
        let (limit, usage) = (mib(64), mib(14));
        let files = |mounts: &'static str, groups: &'static str| {
            [
                ("proc/self/mountinfo", mounts),
                ("proc/self/cgroup", groups),
                ("sys/fs/cgroup/memory.max", limit.as_str()),
                ("sys/fs/cgroup/memory.current", usage.as_str()),
            ]
        };
        let own = "30 29 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n";
        check(&files(own, "0::/\n"), Some(50));
        // Without a namespace of its own it reads the machine's path.
        let part = "30 29 0:26 /docker/ab12 /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n";
        check(&files(part, "0::/docker/ab12\n"), Some(50));
        check(&files(own, "0::/docker/ab12\n"), Some(50));
    }

    #[test]
    fn no_group_or_no_limit_leaves_all_memory() {
        check(&[], None);
        check(&[("proc/self/cgroup", "0::/\n")], None);
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        check(&[("proc/self/cgroup", "0::/a\n"), ("proc/self/mountinfo", mounts)], None);
    }
}
