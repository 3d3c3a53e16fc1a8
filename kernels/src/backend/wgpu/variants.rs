//! Faster alternatives to the plain kernels, and the choice among them. The variants that a device offers follow from
//! the device alone; each is checked on the device before use ([`super::check`]). The plain kernel computes operations
//! that no variant fits.

use super::encodings;
use super::instance::Adapter;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::{Constant, Kernel};
use super::rows::kernel;
use wgpu::Features;

/// How numbers may be rounded inside a product with a frozen matrix. All else is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32 throughout.
    #[default]
    F32,
    /// Factors may be rounded to f16 if that is faster; sums are f32.
    F16,
}

/// A faster way to compute some verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Products on the device's matrix units, in square fragments of this side: factors in f16.
    Cooperative(u32),
    /// Products in register tiles, factors in f16.
    Half,
    /// Products in register tiles.
    Tiled,
    /// Products by broadcasts within subgroups of this size: for software adapters.
    Lanes(u32),
    /// Flash attention in tiles of 32 x 32.
    Flash,
    /// Rows folded by subgroups of any size.
    Subgroups,
    /// Long sums of few outputs, as in an adapter's gradients, in parts that are added up in order. Used with
    /// [`Variant::Tiled`], whose tiles for so small outputs would leave most of a card idle.
    Split,
}

impl Variant {
    /// The name in classes, messages and tables.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Cooperative(8) => "coop8",
            Variant::Cooperative(_) => "coop16",
            Variant::Half => "half",
            Variant::Tiled => "tiled",
            Variant::Lanes(4) => "lanes4",
            Variant::Lanes(_) => "lanes8",
            Variant::Flash => "flash",
            Variant::Subgroups => "subgroups",
            Variant::Split => "split",
        }
    }

    /// Whether it rounds factors.
    pub fn is_reduced(self) -> bool {
        matches!(self, Variant::Cooperative(_) | Variant::Half)
    }

    /// Whether it computes products.
    pub fn is_product(self) -> bool {
        !matches!(self, Variant::Flash | Variant::Subgroups | Variant::Split)
    }

    /// The variants that an adapter could run, the best first.
    pub fn offered(adapter: &Adapter, precision: Precision) -> Vec<Variant> {
        let (features, info) = (adapter.features(), &adapter.info);
        let subgroups = features.contains(Features::SUBGROUP);
        let mut all = Vec::new();
        if precision == Precision::F16 && features.contains(Features::SHADER_F16) {
            if subgroups && features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
                all.extend(fragments(adapter).map(Variant::Cooperative));
            }
            all.push(Variant::Half);
        }
        all.extend(Some(lanes(adapter)).filter(|&lanes| lanes > 0).map(Variant::Lanes));
        all.extend([Variant::Tiled, Variant::Flash]);
        all.extend((lanes(adapter) == 0).then_some(Variant::Split));
        if subgroups && info.subgroup_min_size >= 4 && info.subgroup_max_size <= 64 {
            all.push(Variant::Subgroups);
        }
        all
    }
}

/// Lanes of a software adapter's subgroups if their size is fixed, else 0. A workgroup is one such subgroup.
pub(super) fn lanes(adapter: &Adapter) -> u32 {
    let sizes = (adapter.info.subgroup_min_size, adapter.info.subgroup_max_size);
    match sizes {
        (size @ (4 | 8), most)
            if size == most && adapter.is_software() && adapter.features().contains(Features::SUBGROUP) =>
        {
            size
        }
        _ => 0,
    }
}

/// The side of the fragments that multiply f16 and add f32; the larger one if there are two.
fn fragments(adapter: &Adapter) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    let all = adapter.handle().cooperative_matrix_properties();
    let has = |side: u32| {
        all.iter()
            .any(|p| (p.m_size, p.n_size, p.k_size, p.ab_type, p.cr_type) == (side, side, side, F16, F32))
    };
    [16, 8].into_iter().find(|&side| has(side))
}

kernel!(LANES, "product_lanes", ["product_params", "packed"], [Written, Read, Read]);
kernel!(TILED, "product_tiled", ["product_params", "packed"], [Written, Read, Read]);
kernel!(COOPERATIVE, "product_coop", ["product_params", "packed"], [Written, Read, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&LANES, &TILED, &COOPERATIVE];

/// The largest factor for gradients before they are rounded to f16: 2^8 leaves room for values up to 255, and numbers
/// down to 2.3e-10 are not lost.
pub(super) const LIFT: f32 = 256.0;

/// The properties of a product on which the choice of a variant depends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// The left factor is stored as [k, m].
    pub left_across: bool,
    /// The right factor is stored as [k, n].
    pub right_across: bool,
    /// Encoding of the right factor.
    pub encoding: u32,
    /// m, n, k.
    pub sizes: (usize, usize, usize),
    /// First number of the right factor in its binding.
    pub b_at: usize,
    /// Distance of its rows as stored.
    pub b_stride: usize,
    /// The kind of product.
    pub role: Role,
}

/// Workgroups that keep a large card busy.
const BUSY: usize = 256;
/// Least terms in a part of a sum.
const TERMS: usize = 256;
/// Terms that a tile stages at a time.
const BK: u32 = 16;

/// The kind of a product, which decides what may be rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A product with a frozen matrix.
    Frozen,
    /// The gradient of such a product.
    FrozenGrad,
    /// A product of two f32 matrices: an adapter's own mathematics, never rounded.
    Own,
}

/// A kernel for a product.
#[derive(Debug)]
pub(super) struct Chosen {
    pub kernel: &'static Kernel,
    pub constants: Vec<Constant>,
    /// Rows and columns of the output per workgroup.
    pub tile: (usize, usize),
    /// The factor on the left operand before it is rounded.
    pub lift: f32,
}

/// The variants that a device uses.
#[derive(Debug, Clone, Default)]
pub(super) struct Variants {
    /// For products, the best first.
    pub products: Vec<Variant>,
    pub flash: bool,
    pub subgroups: bool,
    pub split: bool,
    /// Variants dropped because they were wrong, each with the observed difference.
    pub dropped: Vec<(Variant, String)>,
    /// Lanes of every subgroup of a software adapter; 0 for a card, which loads for all lanes at once.
    pub lanes: u32,
    /// A variant that computes wrong results: for tests.
    pub spoiled: Option<Variant>,
    /// Head size or sum length above which the spoiled variant is wrong.
    pub spoiled_beyond: usize,
}

impl Variants {
    /// Enables a variant.
    pub fn take(&mut self, variant: Variant) {
        match variant {
            Variant::Flash => self.flash = true,
            Variant::Subgroups => self.subgroups = true,
            Variant::Split => self.split = true,
            product => self.products.push(product),
        }
    }

    /// Disables a variant by name.
    pub fn drop_one(&mut self, variant: Variant, seen: String) {
        match variant {
            Variant::Flash => self.flash = false,
            Variant::Subgroups => self.subgroups = false,
            Variant::Split => self.split = false,
            product => self.products.retain(|v| *v != product),
        }
        self.dropped.push((variant, seen));
    }

    /// Whether this variant has no work: it was wrong, or the enabled variants cover it.
    pub fn covers(&self, variant: Variant) -> bool {
        if self.dropped.iter().any(|(v, _)| *v == variant) {
            return true;
        }
        match variant {
            Variant::Flash => return self.flash,
            Variant::Subgroups => return self.subgroups,
            Variant::Split => return self.split,
            _ => {}
        }
        let exact = self.products.iter().any(|v| !v.is_reduced());
        let any = !self.products.is_empty();
        exact || (any && variant.is_reduced())
    }

    /// The names of the enabled variants in a class: of products, the first that rounds and the first that does not;
    /// then the others.
    pub fn names(&self) -> String {
        let reduced = self.products.iter().find(|v| v.is_reduced());
        let exact = self.products.iter().find(|v| !v.is_reduced());
        let mut names: Vec<&str> = reduced.into_iter().chain(exact).map(|v| v.name()).collect();
        names.extend(self.flash.then_some(Variant::Flash.name()));
        names.extend(self.subgroups.then_some(Variant::Subgroups.name()));
        names.extend(self.split.then_some(Variant::Split.name()));
        if names.is_empty() { "plain".into() } else { names.join("+") }
    }

    /// The factor on this variant's scale for heads or sums of this length: one, unless a test spoils it.
    pub fn spoil(&self, variant: Variant, length: usize) -> f32 {
        if self.spoiled == Some(variant) && length > self.spoiled_beyond { 1.01 } else { 1.0 }
    }

    /// The number of parts and the terms per part of a product's sums, if splitting them pays. Depends on the shape
    /// alone.
    pub fn parts(&self, asked: &Asked, (variant, chosen): (Variant, &Chosen)) -> Option<(usize, usize)> {
        let (m, n, k) = asked.sizes;
        let tiles = m.div_ceil(chosen.tile.0) * n.div_ceil(chosen.tile.1);
        let parts = (BUSY / tiles.max(1)).min(k / TERMS);
        if !self.split || variant != Variant::Tiled || asked.role != Role::Own || parts < 2 {
            return None;
        }
        // Whole slices of k, so that no part reads into the next.
        let terms = k.div_ceil(parts).next_multiple_of(BK as usize);
        Some((k.div_ceil(terms), terms))
    }

    /// Whether the products with a frozen matrix would unpack each number many times, lane by lane. In that case blocks
    /// are widened first, once for all rows of the product.
    pub fn unpacks_slowly(&self) -> bool {
        matches!(self.products.first(), Some(Variant::Lanes(_)))
    }

    /// The kernel for a product; `None` selects the plain kernel.
    pub fn product(&self, asked: &Asked) -> Option<(Variant, Chosen)> {
        let fits = |v: &&Variant| asked.role != Role::Own || !v.is_reduced();
        let variant = *self.products.iter().find(fits)?;
        let chosen = match variant {
            Variant::Lanes(lanes) => lanes_kernel(asked, lanes),
            Variant::Cooperative(side) => cooperative_kernel(asked, side),
            _ => tiled_kernel(asked, variant),
        };
        Some((variant, chosen))
    }
}

fn basics(asked: &Asked) -> Vec<Constant> {
    vec![
        ("ENCODING", asked.encoding),
        ("LEFT_ACROSS", u32::from(asked.left_across)),
        ("RIGHT_ACROSS", u32::from(asked.right_across)),
    ]
}

/// Tile sizes were measured: more columns per lane are faster, until compilation takes longer than execution.
fn lanes_kernel(asked: &Asked, lanes: u32) -> Chosen {
    let (_, n, k) = asked.sizes;
    let per: u32 = if asked.encoding == 0 { 4 } else { 8 };
    let whole = |x: usize, of: u32| x.is_multiple_of(of as usize);
    let plain = !encodings::is_block(asked.encoding);
    let aligned = plain && whole(asked.b_at, per) && whole(asked.b_stride, per);
    let few = n.div_ceil(lanes as usize);
    let (vector, rows, cols) = match asked.right_across {
        true if aligned && per == 8 && whole(n, 8) && few > 2 => (1, 4, 8),
        true if aligned && per == 4 && whole(n, 4) && few > 2 => (1, 8, 4),
        false if aligned && whole(k, 8) => (1, 8, if few > 2 { 4 } else { few.max(1) as u32 }),
        _ => (0, 8, few.clamp(1, 2) as u32),
    };
    let mut constants = basics(asked);
    constants.extend([("VECTOR", vector), ("PER", per), ("LANES", lanes), ("KB", 8)]);
    constants.extend([("TM", rows), ("TN", cols)]);
    Chosen { kernel: &LANES, constants, tile: (rows as usize, (lanes * cols) as usize), lift: 1.0 }
}

fn lift(asked: &Asked) -> f32 {
    if asked.role == Role::FrozenGrad { LIFT } else { 1.0 }
}

/// 64 x 64 by 128 lanes; 16 rows or columns if the output has no more, as in an adapter's own products.
fn tiled_kernel(asked: &Asked, variant: Variant) -> Chosen {
    let half = variant == Variant::Half;
    let (m, n, _) = asked.sizes;
    let (bm, tm): (u32, u32) = if m <= 16 { (16, 4) } else { (64, 8) };
    let bn: u32 = if n <= 16 { 16 } else { 64 };
    let mut constants = basics(asked);
    constants.extend([("VECTOR", 0), ("HALF", u32::from(half)), ("SPLIT", 0)]);
    constants.extend([("PORTABLE", 0), ("LOOPED", 0)]);
    constants.extend([("BM", bm), ("BN", bn), ("BK", BK), ("TM", tm), ("TN", 4)]);
    let lift = if half { lift(asked) } else { 1.0 };
    Chosen { kernel: &TILED, constants, tile: (bm as usize, bn as usize), lift }
}

fn cooperative_kernel(asked: &Asked, side: u32) -> Chosen {
    let mut constants = basics(asked);
    constants.extend([("VECTOR", 0), ("SIDE", side)]);
    Chosen { kernel: &COOPERATIVE, constants, tile: (64, 64), lift: lift(asked) }
}

/// Every set of constants of the product by broadcasts.
pub(super) fn lanes_sets() -> Vec<Vec<Constant>> {
    let mut sets: Vec<Vec<Constant>> = Vec::new();
    for lanes in [4, 8] {
        for (encoding, across) in encodings::all().into_iter().flat_map(|e| (0..4).map(move |a| (e, a))) {
            for (n, b_at) in [(5, 0), (12, 0), (40, 0), (5, 1), (12, 1), (40, 1)] {
                let (left_across, right_across) = (across & 1 == 1, across & 2 == 2);
                let (sizes, b_stride, role) = ((9, n, 16), 40, Role::Own);
                let asked = Asked { left_across, right_across, encoding, sizes, b_at, b_stride, role };
                let set = lanes_kernel(&asked, lanes).constants;
                if !sets.contains(&set) {
                    sets.push(set);
                }
            }
        }
    }
    sets
}
