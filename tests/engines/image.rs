//! The image of recipes/Dockerfile as a folder: the files that its last stage copies, on a base with nothing but a C
//! library and certificates.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Files of libc6 and libgcc-s1, which every Debian image has.
const BASE: [&str; 6] =
    ["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The last stage of the Dockerfile.
#[derive(Default)]
pub struct Image {
    pub base: String,
    /// What it says after `FROM`.
    pub text: String,
    /// From the first stage, to the image.
    pub copies: Vec<(String, String)>,
    /// Folders of the user: its home and others.
    pub folders: Vec<String>,
    pub user: u32,
    pub group: u32,
    pub work: String,
    pub variables: Vec<(String, String)>,
    /// Users and groups that own its folders.
    owners: Vec<u32>,
    pub entry: Vec<String>,
}

impl Image {
    pub fn read() -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/Dockerfile");
        let text = std::fs::read_to_string(file).unwrap();
        let (_, last) = text.rsplit_once("\nFROM ").unwrap();
        let (base, rest) = last.split_once('\n').unwrap();
        let mut image = Image { base: base.into(), text: rest.into(), ..Image::default() };
        let joined = rest.replace("\\\n", " ");
        for line in joined.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            image.instruction(line);
        }
        let own = |id: &u32| [image.user, image.group].contains(id);
        assert!(
            image.owners.len() == 3 && image.owners.iter().all(own),
            "{:?} own its folders",
            image.owners
        );
        image
    }

    /// An instruction that is not known here fails the test, because the folder would not be the image.
    fn instruction(&mut self, line: &str) {
        let (name, rest) = line.split_once(' ').unwrap();
        match name {
            "RUN" => rest.split("&&").for_each(|command| self.ran(command)),
            "COPY" => {
                let (from, to) = rest.strip_prefix("--from=build ").unwrap().split_once(' ').unwrap();
                self.copies.push((from.into(), to.into()));
            }
            "USER" => {
                let (user, group) = rest.split_once(':').unwrap();
                (self.user, self.group) = (user.parse().unwrap(), group.parse().unwrap());
            }
            "WORKDIR" => self.work = rest.into(),
            "ENV" => {
                let pairs = rest.split(' ').map(|pair| pair.split_once('=').unwrap());
                self.variables = pairs.map(|(name, value)| (name.into(), value.into())).collect();
            }
            "VOLUME" => assert!(self.folders.iter().any(|folder| folder == rest), "{rest} is not the user's"),
            "STOPSIGNAL" => assert_eq!(rest, "SIGTERM"),
            "ENTRYPOINT" => self.entry = serde_json::from_str(rest).unwrap(),
            _ => panic!("this test does not know {line}"),
        }
    }

    fn ran(&mut self, command: &str) {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["apt-get", "update"] | ["rm", "-rf", "/var/lib/apt/lists/*"] => {}
            ["apt-get", "install", "-y", "--no-install-recommends", ref packages @ ..] => {
                assert!(packages.contains(&"ca-certificates"), "{packages:?}");
            }
            ["useradd", "--uid", user, "--create-home", name] => {
                self.owners.push(user.parse().unwrap());
                self.folders.push(format!("/home/{name}"));
            }
            ["install", "-d", "-o", user, "-g", group, folder] => {
                self.owners.extend([user, group].map(|id| id.parse::<u32>().unwrap()));
                self.folders.push(folder.into());
            }
            _ => panic!("this test does not know {command}"),
        }
    }
}

/// The image's files in a folder.
pub struct Root {
    pub image: Image,
    pub folder: PathBuf,
}

impl Root {
    /// Fills `folder`. `program` stands for the one that the first stage builds.
    pub fn new(folder: PathBuf, program: &Path) -> Self {
        let root = Root { image: Image::read(), folder };
        for (from, to) in &root.image.copies {
            assert_eq!(from, "/finetune");
            root.copy(program, to);
        }
        for library in libraries(program) {
            root.copy(&library, library.to_str().unwrap());
        }
        root.copy(Path::new(CERTIFICATES), CERTIFICATES);
        let (user, group) = (root.image.user, root.image.group);
        root.write("/etc/passwd", &format!("worker:x:{user}:{group}::{}:/bin/sh\n", root.image.folders[0]));
        root.write("/etc/nsswitch.conf", "hosts: files dns\n");
        root.write("/etc/hosts", "");
        for name in ["/proc", "/dev", "/tmp", "/data"].map(String::from).iter().chain(&root.image.folders) {
            std::fs::create_dir_all(root.path(name)).unwrap();
        }
        root
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name.trim_start_matches('/'))
    }

    fn copy(&self, from: &Path, to: &str) {
        let to = self.path(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A folder that the image's user may write to, as a volume with `fsGroup` is.
    pub fn own(&self, folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        chown(folder, None, Some(self.image.group)).unwrap();
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o2775)).unwrap();
    }

    /// The image's program as the first process of a container. `network` is a named network namespace, or empty for
    /// one with the loopback interface alone. `data` is mounted, with the file `hosts` beside it.
    pub fn container(&self, network: &str, data: &Path, work: &str) -> Command {
        let mut command = Command::new("/usr/bin/nsenter");
        if !network.is_empty() {
            command.arg(format!("--net=/run/netns/{network}"));
        }
        command.args(["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL"]);
        command.args(network.is_empty().then_some("--net"));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engines/pod.sh");
        let image = &self.image;
        command.arg("bash").arg(script).arg(&self.folder);
        command.args([image.user.to_string(), image.group.to_string(), work.to_string()]);
        command.arg(data.with_file_name("hosts")).arg(data).arg(image.folders.join(":")).args(&image.entry);
        command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", &image.folders[0]).env("HOSTNAME", "container");
        command.envs(image.variables.iter().cloned());
        command
    }
}

/// The libraries that the loader takes.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let out = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let paths = text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
    let all: Vec<PathBuf> = paths.collect();
    for library in &all {
        let name = library.file_name().unwrap().to_str().unwrap();
        assert!(BASE.contains(&name), "{name} is not in the base image");
    }
    assert!(all.len() >= 3, "{text}");
    all
}

/// Whether namespaces with mounts can be made here; if not, prints why the test is skipped.
pub fn possible() -> bool {
    let flags = ["--mount", "--uts", "--pid", "--net", "--fork", "true"];
    let made = Command::new("unshare").args(flags).output().is_ok_and(|out| out.status.success());
    let ip = Command::new("ip").arg("-V").output().is_ok_and(|out| out.status.success());
    let possible = made && ip && rustix::process::geteuid().is_root() && cfg!(target_arch = "x86_64");
    if !possible {
        assert!(std::env::var_os("FINETUNE_NEED_KUBEFLOW").is_none(), "pods must be started here");
        println!(
            "skipped: needs root, x86-64, unshare, ip (apt-get install iproute2) and permission for namespaces"
        );
    }
    possible
}
