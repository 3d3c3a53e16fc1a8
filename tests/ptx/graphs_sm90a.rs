//! Microbatches of a whole model with large products and attention of sm_90a: each is one graph, whose nodes have the
//! arguments and tensor maps of single launches.

use crate::standin::{self, Ran, standin_with};
use crate::step::{Same, packed, qwen};
use finetune::backend::cuda::Flash;
use finetune::backend::{Cuda, Heads};
use finetune::model::decoder::{Build, Decoder, Keep};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::stage::Stage;

/// Kernels and submissions of microbatches of two lengths. Keys and values are too narrow for tiles of sm_90a and use
/// the lower tier.
fn microbatches() -> Result<Vec<[u64; 2]>, String> {
    let config = qwen(2, 300, (256, 320), Heads::new(4, 2, 64));
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 4, alpha: 8.0, targets, seed: 1, ..LoraSpec::none() };
    let build = Build { keep: Keep::Inputs, ..Build::whole(&config) };
    let flash = Flash { forward: true, backward: true };
    let device = Cuda::open(0).and_then(Cuda::bf16).map_err(|e| e.to_string())?.untried().attending(flash);
    let mut stage = Decoder::load(device, &config, &Same::new(config.clone()), &lora, build).unwrap();
    let mut gradient = vec![0.0; stage.layout().len()];
    let mut all = Vec::new();
    for (rows, length) in [(2, 70), (2, 70), (3, 50), (2, 70), (3, 50)] {
        stage.set_parameters(&gradient).map_err(|e| e.to_string())?;
        let before = stage.traffic();
        stage.gradient(&packed(config.vocab, rows, length), &mut gradient).map_err(|e| e.to_string())?;
        let taken = stage.traffic().since(&before);
        all.push([taken.dispatches, taken.submissions]);
    }
    Ok(all)
}

#[test]
fn inside() {
    if std::env::var_os("STANDIN_WORK").is_some() {
        println!("said: {:?}", microbatches());
    }
}

/// Rows, columns, bytes from row to row and rows of a box of a tensor map, as recorded by the stand-in.
fn map(text: &str) -> [u64; 4] {
    let numbers = text.trim_matches(['[', ']']).split(',').skip(1).map(|n| n.parse().unwrap());
    numbers.collect::<Vec<u64>>().try_into().unwrap()
}

/// A product of sm_90a, as recorded by the stand-in.
struct Product<'a> {
    name: &'a str,
    /// For a and b: rows, columns, bytes from row to row, rows of a box.
    maps: [[u64; 4]; 2],
    /// m, n, k
    sizes: [u64; 3],
}

fn product(line: &str) -> Option<Product<'_>> {
    let of_product = |name: &str| name.contains("_sm90a_") && !name.starts_with("attention");
    let (name, rest) = line.split_once(' ').filter(|(name, _)| of_product(name))?;
    let args: Vec<&str> = rest.split_once(": ")?.1.split(' ').collect();
    let sizes = [3, 4, 5].map(|i| u64::from_str_radix(args[i], 16).unwrap());
    Some(Product { name, maps: [map(args[1]), map(args[2])], sizes })
}

/// Attention and its gradient: q, k, v (and dout) are matrices of all tokens of a microbatch, of four heads and of two.
fn attended(work: &[&str]) {
    for (name, counts, box_rows) in [
        ("attention_sm90a_64 ", &[4, 2, 2][..], 128),
        ("attention_grad_sm90a_q_64 ", &[4, 2, 2, 4], 64),
        ("attention_grad_sm90a_kv_64 ", &[4, 2, 2, 4], 64),
    ] {
        let lines: Vec<_> = work.iter().filter(|line| line.starts_with(name)).collect();
        assert!(lines.len() >= 2 * 5, "{name}: {} times", lines.len());
        for (i, line) in lines.iter().enumerate() {
            let tokens = [140, 140, 150, 140, 150][5 * i / lines.len()];
            let maps: Vec<_> = line.split(' ').filter(|word| word.starts_with('[')).map(map).collect();
            let want = counts.iter().map(|heads| [tokens, 64 * heads, 2 * 64 * heads, box_rows]);
            assert!(maps.iter().copied().eq(want), "{line}");
        }
    }
}

#[test]
fn a_microbatch_with_tensor_maps_is_one_graph() {
    let (Some(folder), Some(lacking)) = (standin_with(&[]), standin_with(&["-DNO_GRAPHS"])) else { return };
    let of = |case, libraries| standin::child("graphs_sm90a::inside", case, "", libraries);
    let (with, without) = (of("hopper", folder.path()), of("hopper", lacking.path()));
    let kernels = without.work().iter().filter(|line| !line.starts_with("upload")).count();
    let each = (kernels / 5).to_string();
    let sent = |[first, later]: [&str; 2]| {
        let all = [first, later, later, later, later].map(|n| format!("[{each}, {n}]"));
        format!("Ok([{}])", all.join(", "))
    };
    assert_eq!((&with.out, &without.out), (&sent([&each, "1"]), &sent([&each, &each])), "{}", with.said);
    assert_eq!([&with, &without].map(|ran| (ran.count("# made"), ran.count("# graph"))), [(1, 4), (0, 0)]);
    let (got, want) = (with.work(), without.work());
    let differs = got.iter().zip(&want).position(|(a, b)| a != b);
    assert!(got == want, "line {differs:?} differs: {:?}", differs.map(|i| (got[i], want[i])));

    // The map agrees with the kernel's arguments.
    let products: Vec<_> = want.iter().filter_map(|line| product(line)).collect();
    for Product { name, maps: [a, b], sizes: [m, n, k] } in &products {
        let (rows, cols, box_rows) = if name.ends_with("_nt") { (n, k, 256) } else { (k, n, 64) };
        for (map, (rows, cols, box_rows)) in [(a, (m, k, 128)), (b, (rows, cols, box_rows))] {
            assert_eq!(*map, [*rows, *cols, 2 * cols.next_multiple_of(8), box_rows], "{name}: {m} {n} {k}");
        }
    }
    attended(&want);
    let count = |name: &str| products.iter().filter(|product| product.name == name).count();
    for name in ["product_sm90a_nt", "product_sm90a_nn", "lora_linear_sm90a_nt", "lora_linear_sm90a_nn"] {
        println!("{name}: {}", count(name));
        assert!(count(name) >= 5, "{name} in every microbatch");
    }

    // A node with the map of an earlier microbatch is detected.
    let stale: Ran = of("hopper-stale", folder.path());
    assert!(stale.out == with.out && stale.work() != want, "an old map passes for a new one");
}
