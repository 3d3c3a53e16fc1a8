//! Every kernel text that a device may compile, for tests that translate all of them without a device.

use super::kernel::{Constant, Kernel, PRELUDE};
use super::{attention, convolution, delta, device, encodings, loss, portable, products, rows, variants};
use crate::numeric::block::Block;

/// A kernel with one set of constants.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Kernel and constants.
    pub name: String,
    /// The text for the driver.
    pub text: String,
    kernel: &'static Kernel,
    constants: Vec<Constant>,
}

impl Entry {
    /// The kernel's name, without constants.
    pub fn stem(&self) -> &'static str {
        self.kernel.name
    }

    /// The value of a constant.
    pub fn constant(&self, name: &str) -> Option<u32> {
        self.constants.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
    }
}

/// All kernels, and their source pieces as their files have them.
pub fn catalogue() -> (Vec<Entry>, Vec<&'static str>) {
    let lists = [
        rows::KERNELS,
        loss::KERNELS,
        attention::KERNELS,
        convolution::KERNELS,
        delta::KERNELS,
        products::KERNELS,
        variants::KERNELS,
        device::KERNELS,
    ];
    let kernels: Vec<&'static Kernel> = [lists.concat(), portable::kernels()].concat();
    let mut pieces: Vec<&'static str> = kernels.iter().flat_map(|k| k.source.iter().copied()).collect();
    pieces.push(PRELUDE);
    pieces.extend(Block::ALL.iter().flat_map(|block| encodings::pieces(*block).iter().copied()));
    let entries = kernels.iter().flat_map(|kernel| {
        sets(kernel).into_iter().map(|constants| {
            let said: Vec<String> = constants.iter().map(|(n, v)| format!("{n}={v}")).collect();
            let name = format!("{} {}", kernel.name, said.join(" "));
            Entry { name, text: kernel.text(&constants), kernel, constants }
        })
    });
    (entries.collect(), pieces)
}

/// Every combination of values.
fn product(axes: &[(&'static str, &[u32])]) -> Vec<Vec<Constant>> {
    axes.iter().fold(vec![Vec::new()], |sets, (name, values)| {
        let longer = |set: &Vec<Constant>| {
            values.iter().map(|v| [&set[..], &[(*name, *v)]].concat()).collect::<Vec<_>>()
        };
        sets.iter().flat_map(longer).collect()
    })
}

const ACROSS: [(&str, &[u32]); 2] = [("LEFT_ACROSS", &[0, 1]), ("RIGHT_ACROSS", &[0, 1])];

/// The sets of constants for a kernel, by its name.
fn sets(kernel: &Kernel) -> Vec<Vec<Constant>> {
    let every = encodings::all();
    let encoding = ("ENCODING", &every[..]);
    let frozen = [&[encoding][..], &ACROSS[..]].concat();
    match kernel.name {
        name if name.starts_with("portable") => portable::sets(name),
        "embed" | "head_subtract" | "linear" | "linear_grad" => product(&[encoding, ("VECTOR", &[0])]),
        "widen" => {
            let blocks: Vec<u32> = every.iter().copied().filter(|n| encodings::is_block(*n)).collect();
            product(&[("ENCODING", &blocks[..]), ("VECTOR", &[0])])
        }
        "matmul" => product(&ACROSS),
        "rmsnorm" | "rmsnorm_grad" | "scale_rows_grad" | "cross_entropy" => {
            product(&[("SUBGROUPS", &[0, 1]), ("WIDTH", &[4, 8, 256])])
        }
        name if name.starts_with("attention") || name.starts_with("flash") => {
            let sizes = product(&[("LANES", &[0, 4, 8]), ("SIZE", &[16, 32, 64, 80, 128, 256])]);
            let sets = sizes.into_iter().flat_map(|set| {
                let (lanes, size) = (set[0].1, set[1].1);
                let parts = attention::parts_of(name, size).iter();
                let constants = attention::constants_of(size, lanes);
                parts.map(move |&part| [&constants[..], &[("PART", part)]].concat())
            });
            sets.collect()
        }
        "product_tiled" => {
            let tiles = |rows: &'static [u32], tm: &'static [u32]| {
                let axes: [(&str, &[u32]); 10] = [
                    ("VECTOR", &[0]),
                    ("HALF", &[0, 1]),
                    ("SPLIT", &[0]),
                    ("PORTABLE", &[0]),
                    ("LOOPED", &[0]),
                    ("BM", rows),
                    ("BN", &[16, 64]),
                    ("BK", &[16]),
                    ("TM", tm),
                    ("TN", &[4]),
                ];
                product(&[&frozen[..], &axes[..]].concat())
            };
            let whole = [tiles(&[64], &[8]), tiles(&[16], &[4])].concat();
            let own = |set: &Vec<Constant>| set.contains(&("ENCODING", 0)) && set.contains(&("HALF", 0));
            let cut = |set: &Vec<Constant>| {
                set.iter().map(|&(n, v)| (n, if n == "SPLIT" { 1 } else { v })).collect::<Vec<_>>()
            };
            let parts = whole.iter().filter(|set| own(set)).map(cut).collect::<Vec<_>>();
            [whole, parts].concat()
        }
        "product_coop" => product(&[&frozen[..], &[("VECTOR", &[0][..]), ("SIDE", &[8, 16])]].concat()),
        "product_lanes" => variants::lanes_sets(),
        _ => vec![Vec::new()],
    }
}
