//! Lists NVIDIA devices, or says in one line why there are none.

use super::kernels::SOURCES;
use super::libcuda;

/// One device as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The driver's number, after CUDA_VISIBLE_DEVICES.
    pub ordinal: usize,
    /// For example `NVIDIA H200`.
    pub name: String,
    /// Domain, bus, device, function: the physical card.
    pub pci: String,
    /// Bytes.
    pub memory: u64,
    /// For example (9, 0).
    pub capability: (u32, u32),
    /// The device shares the machine's memory, as in Jetson and GB10.
    pub integrated: bool,
}

impl Device {
    /// Why the kernels cannot run on the device, in words.
    pub fn unusable(&self) -> Option<String> {
        let (major, minor) = self.capability;
        let needed = SOURCES.iter().map(|s| s.target()).min().unwrap_or(0);
        (major * 10 + minor < needed).then(|| {
            let needed = dotted(needed);
            format!("compute capability {major}.{minor}, and the kernels need {needed} (Volta): --gpu-backend wgpu drives it through Vulkan")
        })
    }
}

/// A driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// CUDA version of the driver: 12080 means 12.8.
    pub driver: u32,
    /// In the driver's order.
    pub devices: Vec<Device>,
    /// Devices that the driver counts but cannot describe, and why.
    pub broken: Vec<(usize, Absent)>,
}

/// Why no NVIDIA device can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// libcuda cannot be loaded.
    #[error("no NVIDIA driver: libcuda is not there; install the driver, no toolkit is needed")]
    Driver,
    /// The library is a toolkit's stand-in for linking.
    #[error(
        "libcuda is the stub of a CUDA toolkit, which drives no device: put the folder of the driver's libcuda.so.1 first in LD_LIBRARY_PATH"
    )]
    Stub,
    /// The driver is present but does not start.
    #[error("the NVIDIA driver does not start: {reason}; `nvidia-smi` says more")]
    Start {
        /// The driver's name for it.
        reason: String,
    },
    /// The driver counts a device but does not describe it.
    #[error("the NVIDIA driver does not describe device {ordinal}: {reason}; `nvidia-smi` says more")]
    Card {
        /// The driver's number.
        ordinal: usize,
        /// The driver's name for it.
        reason: String,
    },
    /// The driver cannot read the kernels.
    #[error("the NVIDIA driver is too old: CUDA {}, which reads PTX {}, and the kernels are PTX {}; CUDA 11.0 (driver 450) is enough",
        dotted(.driver / 1000 * 10 + .driver % 1000 / 10), dotted(*.reads), dotted(*.needed))]
    TooOld {
        /// CUDA version: 10020 means 10.2.
        driver: u32,
        /// Latest PTX version that the driver reads: 65 means 6.5.
        reads: u32,
        /// PTX version of the kernels.
        needed: u32,
    },
    /// The driver has no device, or CUDA_VISIBLE_DEVICES hides them.
    #[error("the NVIDIA driver has no device (CUDA_VISIBLE_DEVICES may hide it)")]
    Device,
}

/// Formats 65 as "6.5".
fn dotted(tenths: u32) -> String {
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// PTX versions by the CUDA version that brought them (PTX manual, release notes).
const PTX: [(u32, u32); 22] = [
    (9000, 60),
    (9010, 61),
    (9020, 62),
    (10000, 63),
    (10010, 64),
    (10020, 65),
    (11000, 70),
    (11010, 71),
    (11020, 72),
    (11030, 73),
    (11040, 74),
    (11050, 75),
    (11060, 76),
    (11070, 77),
    (11080, 78),
    (12000, 80),
    (12010, 81),
    (12020, 82),
    (12030, 83),
    (12040, 84),
    (12050, 85),
    (12080, 87),
];

/// The latest PTX version that a driver of this CUDA version reads.
pub fn ptx_version(driver: u32) -> u32 {
    PTX.iter().rev().find(|(cuda, _)| *cuda <= driver).map_or(0, |(_, ptx)| *ptx)
}

/// All devices that the driver counts, or the reason why it counts none.
pub fn devices() -> Result<Found, Absent> {
    let driver = u32::try_from(libcuda::start()?).unwrap_or(0);
    // Files for exactly one capability are optional: other devices and older drivers skip them.
    let needed = SOURCES.iter().filter(|s| !s.exact()).map(|s| s.version()).max().unwrap_or(0);
    let reads = ptx_version(driver);
    if reads < needed {
        return Err(Absent::TooOld { driver, reads, needed });
    }
    let (mut devices, mut broken) = (Vec::new(), Vec::new());
    for ordinal in 0..libcuda::count()? {
        match libcuda::describe(ordinal) {
            Ok(device) => devices.push(device),
            Err(why) => broken.push((ordinal, why)),
        }
    }
    if devices.is_empty() && broken.is_empty() {
        return Err(Absent::Device);
    }
    Ok(Found { driver, devices, broken })
}

/// Free bytes of a device, or `None` if the driver does not report them.
pub fn free(ordinal: usize) -> Option<u64> {
    libcuda::start().ok()?;
    libcuda::free(ordinal)
}

/// The version of the driver, for example `550.54.14`, if the system reports it; otherwise its CUDA version.
pub fn build(cuda: u32) -> String {
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let number = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    version.split_whitespace().find(number).map_or_else(|| format!("cuda{cuda}"), String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_version_follows_the_driver_version() {
        let cases = [(8000, 0), (10020, 65), (11000, 70), (11045, 74), (12000, 80), (12060, 85), (13000, 87)];
        cases.iter().for_each(|(driver, ptx)| assert_eq!(ptx_version(*driver), *ptx, "CUDA {driver}"));
    }

    #[test]
    fn old_driver_message_names_both_versions() {
        let said = Absent::TooOld { driver: 10020, reads: 65, needed: 70 }.to_string();
        assert!(said.contains("CUDA 10.2, which reads PTX 6.5, and the kernels are PTX 7.0"), "{said}");
    }
}
