//! Why no GPU is found, in one line with the command that helps. wgpu reports only that there is none, so the system is
//! examined: loader, drivers, device files, and the permission to open them. The choice among the reasons is a pure
//! function of these facts.

use std::path::{Path, PathBuf};

/// Facts about the system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Why the Vulkan loader does not load; `None` if it loads or the system needs none.
    pub loader: Option<String>,
    /// The environment variable that names driver files, and its value, if it is set.
    pub variable: Option<(&'static str, String)>,
    /// Driver manifests that exist.
    pub drivers: Vec<String>,
    /// Device files of cards.
    pub nodes: Vec<Node>,
    /// Whether an NVIDIA kernel driver is loaded.
    pub nvidia: bool,
    /// Windows Subsystem for Linux.
    pub wsl: bool,
    /// The process runs in a container.
    pub container: bool,
}

/// A device file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Path.
    pub path: PathBuf,
    /// The group that may open the file, if this process may not.
    pub denied_to_all_but: Option<String>,
}

/// Why there is no GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Absence {
    /// The Vulkan loader does not load, for this reason.
    Loader(String),
    /// The environment variable names no existing driver.
    Variable {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// No driver manifest exists.
    NoDriver,
    /// WSL needs Mesa's dzn driver.
    Wsl,
    /// A device file exists but cannot be opened.
    Permission {
        /// The file.
        node: PathBuf,
        /// The group that may open it.
        group: String,
    },
    /// The container has no card.
    Container,
    /// The NVIDIA kernel driver is loaded, but its Vulkan driver is missing.
    Nvidia,
    /// A card and drivers exist, but no driver offers an adapter.
    OtherDriver {
        /// The card's device file.
        node: PathBuf,
        /// Names of the driver manifests.
        drivers: String,
    },
    /// No card was found.
    NoCard,
    /// No adapter on Windows and other systems, where drivers bring everything.
    NoAdapter,
}

impl Absence {
    /// What is missing, in one line.
    pub fn what(&self) -> String {
        match self {
            Absence::Loader(why) => format!("the Vulkan loader (libvulkan.so.1) cannot be loaded ({why})"),
            Absence::Variable { variable, value } => {
                format!("{variable}={value} names no Vulkan driver that is there")
            }
            Absence::NoDriver => "no Vulkan driver is installed".into(),
            Absence::Wsl => "under WSL, Vulkan reaches the card through Mesa's dzn driver".into(),
            Absence::Permission { node, .. } => format!("no permission to open {}", node.display()),
            Absence::Container => "this container was given no GPU".into(),
            Absence::Nvidia => "an NVIDIA card is here and its Vulkan driver is not".into(),
            Absence::OtherDriver { node, drivers } => {
                format!("{} is here, and none of the Vulkan drivers ({drivers}) takes it", node.display())
            }
            Absence::NoCard => "no GPU is in this machine, or its kernel driver is not loaded".into(),
            Absence::NoAdapter => "no graphics driver offers an adapter".into(),
        }
    }

    /// The remedy, in one line.
    pub fn fix(&self) -> String {
        let fix = match self {
            Absence::Loader(_) => {
                "apt install libvulkan1 mesa-vulkan-drivers, dnf install vulkan-loader mesa-vulkan-drivers, or pacman -S \
                 vulkan-icd-loader"
            }
            Absence::Variable { variable, .. } => return format!("unset {variable}"),
            Absence::NoDriver => {
                "apt install mesa-vulkan-drivers (AMD, Intel), or NVIDIA's driver package with its Vulkan part \
                 (libnvidia-gl)"
            }
            Absence::Wsl => {
                "update Windows' own driver of the card, then apt install mesa-vulkan-drivers (24 or later), or run \
                 finetune.exe on Windows, which takes DX12"
            }
            Absence::Permission { group, .. } => {
                return format!("sudo usermod -aG {group} $USER, then log in again");
            }
            Absence::Container => {
                "start it with --device /dev/dri (AMD, Intel), or with --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all \
                 (NVIDIA)"
            }
            Absence::Nvidia => {
                "install the driver's libnvidia-gl package; in a container set NVIDIA_DRIVER_CAPABILITIES=all"
            }
            Absence::OtherDriver { .. } => "install its vendor's (docs/gpu.md)",
            Absence::NoCard => "lspci | grep -Ei 'vga|3d|display' shows what is plugged in",
            Absence::NoAdapter => "install the driver of the card's vendor",
        };
        fix.into()
    }
}

impl std::fmt::Display for Absence {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}: {}", self.what(), self.fix())
    }
}

/// The first applicable reason.
pub fn of(facts: &Facts) -> Absence {
    if !cfg!(target_os = "linux") && facts.loader.is_none() && facts.drivers.is_empty() {
        return Absence::NoAdapter;
    }
    if let Some(why) = &facts.loader {
        return Absence::Loader(why.clone());
    }
    if let (Some((variable, value)), true) = (&facts.variable, facts.drivers.is_empty()) {
        return Absence::Variable { variable, value: value.clone() };
    }
    if let Some(node) = facts.nodes.iter().find(|node| node.denied_to_all_but.is_some()) {
        let group = node.denied_to_all_but.clone().unwrap_or_default();
        return Absence::Permission { node: node.path.clone(), group };
    }
    let has = |name: &str| facts.drivers.iter().any(|driver| driver.contains(name));
    match facts.nodes.first() {
        _ if facts.wsl && !has("dzn") => Absence::Wsl,
        _ if facts.nvidia && !has("nvidia") => Absence::Nvidia,
        None if facts.container && !facts.nvidia => Absence::Container,
        _ if facts.drivers.is_empty() => Absence::NoDriver,
        Some(node) => {
            let drivers = facts.drivers.iter().map(|d| d.trim_end_matches(".json")).collect::<Vec<_>>();
            Absence::OtherDriver { node: node.path.clone(), drivers: drivers.join(", ") }
        }
        None if facts.wsl => Absence::Wsl,
        None => Absence::NoCard,
    }
}

impl Facts {
    /// Examines this system.
    pub fn gather() -> Self {
        let variable = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"]
            .into_iter()
            .find_map(|name| Some((name, std::env::var(name).ok().filter(|v| !v.is_empty())?)));
        let drivers = match &variable {
            Some((_, files)) => std::env::split_paths(files).flat_map(|path| manifests(&path)).collect(),
            None => folders().iter().flat_map(|folder| manifests(folder)).collect(),
        };
        let version = std::fs::read_to_string("/proc/version").unwrap_or_default().to_lowercase();
        let marks = ["/.dockerenv", "/run/.containerenv"];
        Facts {
            loader: loader(),
            variable,
            drivers,
            nodes: nodes(Path::new("/dev/dri")),
            nvidia: Path::new("/dev/nvidiactl").exists(),
            wsl: version.contains("microsoft"),
            container: marks.iter().any(|mark| Path::new(mark).exists())
                || std::env::var_os("container").is_some()
                || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
        }
    }
}

fn loader() -> Option<String> {
    #[cfg(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd"))]
    return super::vulkan::loader_missing();
    #[cfg(not(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd")))]
    None
}

/// The folders in which the loader looks for manifests.
fn folders() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = Vec::new();
    for (variable, otherwise) in [
        ("XDG_CONFIG_DIRS", "/etc/xdg:/etc"),
        ("XDG_DATA_DIRS", "/usr/local/share:/usr/share"),
        ("XDG_CONFIG_HOME", ""),
        ("XDG_DATA_HOME", ""),
    ] {
        let listed = std::env::var_os(variable).unwrap_or_else(|| otherwise.into());
        roots.extend(std::env::split_paths(&listed).filter(|path| path.is_absolute()));
    }
    roots.extend(["/etc".into(), "/usr/local/etc".into(), "/usr/share".into()]);
    if let Some(home) = std::env::home_dir() {
        roots.extend([home.join(".config"), home.join(".local/share")]);
    }
    roots.sort();
    roots.dedup();
    roots.into_iter().map(|root| root.join("vulkan/icd.d")).collect()
}

/// The names of a manifest, or of the manifests in a folder.
fn manifests(path: &Path) -> Vec<String> {
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_string());
    if path.is_file() {
        return name(path).into_iter().collect();
    }
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let files = entries.flatten().map(|entry| entry.path());
    let mut found: Vec<String> =
        files.filter(|p| p.extension().is_some_and(|e| e == "json")).filter_map(|p| name(&p)).collect();
    found.sort();
    found
}

/// Render nodes, each with the group that may open it if this process may not.
fn nodes(folder: &Path) -> Vec<Node> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let render = |path: &PathBuf| path.to_string_lossy().contains("renderD");
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(render).collect();
    paths.sort();
    let node = |path: PathBuf| {
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
        let denied = opened.is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied);
        Node { denied_to_all_but: denied.then(|| group_of(&path)), path }
    };
    paths.into_iter().map(node).collect()
}

/// The name of a file's group, or its number if it has no name.
fn group_of(path: &Path) -> String {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let Ok(id) = std::fs::metadata(path).map(|meta| meta.gid()) else { return "render".into() };
        let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
        let named = groups.lines().find_map(|line| {
            let mut parts = line.split(':');
            let (name, number) = (parts.next()?, parts.nth(1)?);
            (number.parse() == Ok(id)).then(|| name.to_string())
        });
        named.unwrap_or_else(|| id.to_string())
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        "render".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(denied: Option<&str>) -> Vec<Node> {
        vec![Node { path: "/dev/dri/renderD128".into(), denied_to_all_but: denied.map(String::from) }]
    }

    /// Checks the line for these facts.
    #[track_caller]
    fn check(facts: Facts, parts: &[&str]) {
        let line = of(&facts).to_string();
        for part in parts {
            assert!(line.contains(part), "{part:?} in {line:?} for {facts:?}");
        }
        assert!(!line.contains('\n'), "{line}");
    }

    /// Facts may contain colons; the fix is a separate field.
    #[test]
    fn a_finding_is_not_cut_at_a_colon() {
        let why = Absence::Loader("a.so: cannot open: No such file".into());
        let what = "the Vulkan loader (libvulkan.so.1) cannot be loaded (a.so: cannot open: No such file)";
        assert_eq!(why.what(), what);
        assert!(why.fix().starts_with("apt install libvulkan1"), "{}", why.fix());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn every_cause_gives_a_message_and_a_command() {
        let none = Facts::default();
        let mesa = Facts {
            drivers: vec!["lvp_icd.x86_64.json".into(), "radeon_icd.x86_64.json".into()],
            ..none.clone()
        };
        let variable = Some(("VK_DRIVER_FILES", "/nowhere.json".to_string()));
        check(
            Facts { loader: Some("no such file".into()), container: true, ..none.clone() },
            &["apt install libvulkan1", "no such file"],
        );
        check(
            Facts { variable, ..none.clone() },
            &["VK_DRIVER_FILES=/nowhere.json", "unset VK_DRIVER_FILES"],
        );
        check(none.clone(), &["no Vulkan driver is installed", "apt install mesa-vulkan-drivers"]);
        check(
            Facts { nodes: node(Some("render")), ..mesa.clone() },
            &["/dev/dri/renderD128", "usermod -aG render $USER"],
        );
        check(Facts { container: true, ..mesa.clone() }, &["container", "--device /dev/dri"]);
        check(Facts { container: true, ..none.clone() }, &["container", "--device /dev/dri"]);
        check(Facts { container: true, nvidia: true, ..mesa.clone() }, &["NVIDIA_DRIVER_CAPABILITIES=all"]);
        check(Facts { wsl: true, ..mesa.clone() }, &["WSL", "dzn", "finetune.exe"]);
        check(Facts { nodes: node(None), ..mesa.clone() }, &["renderD128 is here", "lvp_icd.x86_64, radeon"]);
        check(mesa, &["no GPU is in this machine", "lspci"]);
    }

    #[test]
    #[cfg(unix)]
    fn device_group_has_its_system_name() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!group_of(dir.path()).is_empty());
        assert_eq!(nodes(dir.path()), Vec::new());
        std::fs::write(dir.path().join("renderD128"), "").unwrap();
        std::fs::write(dir.path().join("card0"), "").unwrap();
        let found = nodes(dir.path());
        assert_eq!((found.len(), found[0].denied_to_all_but.clone()), (1, None));
    }
}
