//! One graph launch per microbatch, on the stand-in, which records every kernel and its arguments. With graphs the
//! same kernels run in the same order on the same numbers as without; if a driver refuses a call, the run continues
//! with single launches.

use crate::bench::{Mat, weight};
use crate::standin::{self, Ran, standin_with};
use crate::step::{Same, packed, qwen};
use finetune::backend::{Backend, Cuda, Heads, Write, view, view_mut};
use finetune::model::decoder::{Build, Decoder, Keep};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::stage::{Microbatch, Stage};
use finetune::numeric::dtype::Dtype;
use std::path::Path;

/// The call that a driver refuses, and the message.
const REFUSED: &[(&str, &str)] = &[
    ("graph-create", "cuGraphCreate: CUDA_ERROR_OUT_OF_MEMORY"),
    ("graph-node", "cuGraphAddKernelNode: CUDA_ERROR_NOT_SUPPORTED"),
    ("graph-instantiate", "cuGraphInstantiate: CUDA_ERROR_OUT_OF_MEMORY"),
    ("graph-params", "cuGraphExecKernelNodeSetParams: CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"),
    ("graph-launch", "cuGraphLaunch: CUDA_ERROR_NOT_SUPPORTED"),
    ("graphs-old", "the driver is that of CUDA 11.8, and graphs need 12.0"),
    ("graphs-missing", "the driver has no cuGraphCreate"),
];

/// Microbatches of two lengths, one of them again after the other one.
fn batches(vocab: usize) -> Vec<Microbatch> {
    [(2, 9), (2, 9), (2, 9), (3, 7), (2, 9), (1, 30), (1, 30)].map(|(rows, t)| packed(vocab, rows, t)).into()
}

/// Kernels and submissions of each microbatch, or the first fault.
fn microbatches(dropout: f32, keep: Keep) -> Result<Vec<(u64, u64)>, String> {
    let config = qwen(2, 50, (32, 48), Heads::new(2, 1, 16));
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 4, alpha: 8.0, dropout, targets, seed: 1, ..LoraSpec::none() };
    let build = Build { keep, ..Build::whole(&config) };
    let device = Cuda::open(0).and_then(Cuda::bf16).map_err(|e| e.to_string())?;
    let mut stage = Decoder::load(device, &config, &Same::new(config.clone()), &lora, build).unwrap();
    let mut gradient = vec![0.0; stage.layout().len()];
    let mut all = Vec::new();
    for batch in batches(config.vocab) {
        stage.set_parameters(&gradient).map_err(|e| e.to_string())?;
        let before = stage.traffic();
        stage.gradient(&batch, &mut gradient).map_err(|e| e.to_string())?;
        let taken = stage.traffic().since(&before);
        all.push((taken.dispatches, taken.submissions));
    }
    Ok(all)
}

/// Lists with these numbers of launches.
fn lists(lengths: impl Iterator<Item = u32>) -> Result<(), String> {
    let mut device = Cuda::open(0).map_err(|e| e.to_string())?;
    let mut x = device.memory(4);
    for n in lengths {
        (0..n).for_each(|_| device.fill(view_mut(&mut x, 1, 4), 1.0));
        device.read(view(&x, 1, 4), &mut [0.0; 4]).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// A graph that fails without a read, and a number of kernels after it.
fn after(n: usize, value: f32) -> Result<(), String> {
    let mut device = Cuda::open(0).map_err(|e| e.to_string())?;
    let mut x = device.memory(4);
    for (n, value) in [(10, 1.0), (10, 1.0), (n, value)] {
        (0..n).for_each(|_| device.fill(view_mut(&mut x, 1, 4), value));
        device.upload(view_mut(&mut x, 1, 4), &[0.0; 4]);
    }
    device.read(view(&x, 1, 4), &mut [0.0; 4]).map_err(|e| e.to_string())
}

/// Products by wgmma, each with two tensor maps. The third list has other sizes; in the fourth only one map differs,
/// because the narrowed copy is at another address.
fn wgmma() -> Result<(), String> {
    let mut device = Cuda::open(0).and_then(Cuda::bf16).map_err(|e| e.to_string())?.untried();
    let w = weight(&mut device, &Mat::random(256, 64, 1), Dtype::Bf16);
    for (t, elsewhere) in [(128, false), (128, false), (130, false), (130, true)] {
        let _before = elsewhere.then(|| device.memory(64 * t / 2));
        let (x, mut y) = (device.memory(64 * t), device.memory(256 * t));
        (0..10).for_each(|_| device.linear(view_mut(&mut y, t, 256), Write::Set, view(&x, t, 64), &w));
        device.read(view(&y, 1, 4), &mut [0.0; 4]).map_err(|e| e.to_string())?;
    }
    Ok(())
}

#[test]
fn inside() {
    match std::env::var("STANDIN_WORK").as_deref() {
        Ok("wgmma") => println!("said: {:?}", wgmma()),
        Ok("lists") => println!("said: {:?}", lists((10..30).flat_map(|n| [n, n]))),
        Ok("turns") => println!("said: {:?}", lists((0..10).flat_map(|_| 10..30))),
        Ok("phases") => println!("said: {:?}", lists(phases())),
        Ok("again") => println!("said: {:?}", after(10, 1.0)),
        Ok("others") => println!("said: {:?}", after(10, 2.0)),
        Ok("few") => println!("said: {:?}", after(3, 1.0)),
        Ok("dropout") => println!("said: {:?}", microbatches(0.1, Keep::Inputs)),
        Ok(_) => println!("said: {:?}", microbatches(0.0, Keep::Everything)),
        Err(_) => {}
    }
}

fn run(case: &str, work: &str, libraries: &Path) -> Ran {
    standin::child("graphs::inside", case, work, libraries)
}

/// The kernels of every microbatch, if each has that many.
fn kernels(ran: &Ran, each: u64) -> Vec<Vec<&str>> {
    let kernels = ran.work().into_iter().filter(|line| !line.starts_with("upload"));
    kernels.collect::<Vec<_>>()[1..].chunks(each as usize).map(<[_]>::to_vec).collect()
}

#[test]
fn a_microbatch_is_one_graph_after_warm_up() {
    let Some(folder) = standin_with(&[]) else { return };
    for work in ["model", "dropout"] {
        let (with, without) = (run("fine", work, folder.path()), run("graphs-old", work, folder.path()));
        let [a, b] = [&with, &without].map(|ran| {
            let all = ran.out.strip_prefix("Ok([").and_then(|l| l.strip_suffix("])")).unwrap();
            let pair = |pair: &str| -> Vec<u64> {
                pair.trim_matches(['(', ')']).split(", ").map(|n| n.parse().unwrap()).collect()
            };
            all.split("), (").map(pair).collect::<Vec<_>>()
        });
        let launched = a[0][0];
        assert!(launched > 80, "{launched} kernels");
        println!("{work}: {launched} kernels, sent {:?}", a.iter().map(|m| m[1]).collect::<Vec<_>>());
        // The first microbatch is launched kernel by kernel; another length uses the same graph.
        assert_eq!(
            a.iter().map(|m| m[1]).collect::<Vec<_>>(),
            [launched, 1, 1, 1, 1, 1, 1],
            "{work}: {}",
            with.said
        );
        assert!(b.iter().all(|m| *m == [launched, launched]), "{work}: {b:?}");
        let each = kernels(&with, launched);
        assert!(each[1] == each[2] && each[5] == each[6], "{work}: the same microbatch has other addresses");
        assert_eq!(
            [&with, &without].map(|ran| (ran.count("# graph"), ran.count("# made"))),
            [(6, 1), (0, 0)]
        );
        // Each file is compiled once.
        let modules: Vec<_> = with.log.iter().filter(|l| l.starts_with("# module")).collect();
        let once: std::collections::BTreeSet<_> = modules.iter().collect();
        assert!(once.len() == modules.len() && once.len() > 8, "{work}: {modules:?}");
        let (got, want) = (with.work(), without.work());
        assert!(want.len() as u64 > 7 * launched, "uploads and kernels");
        let differs = got.iter().zip(&want).position(|(a, b)| a != b);
        assert!(got == want, "{work}: line {differs:?} differs: {:?}", differs.map(|i| (got[i], want[i])));
    }
}

#[test]
fn whatever_a_driver_refuses_a_run_goes_on_kernel_by_kernel() {
    let (Some(folder), Some(lacking)) = (standin_with(&[]), standin_with(&["-DNO_GRAPHS"])) else { return };
    let want = run("fine", "model", folder.path());
    for (case, why) in REFUSED {
        let place = if *case == "graphs-missing" { lacking.path() } else { folder.path() };
        let got = run(case, "model", place);
        assert!(got.work() == want.work(), "{case}: other kernels");
        let reports: Vec<&str> = got.said.lines().filter(|l| l.contains("kernel by kernel")).collect();
        assert!(reports.len() == 1 && reports[0].contains(why), "{case}: {}", got.said);
        assert!(got.count("# graph") <= 2, "{case}: it goes on with graphs");
    }
}

#[test]
fn a_fault_in_a_graph_names_where_it_begins_and_ends() {
    let Some(folder) = standin_with(&[]) else { return };
    let ran = run("graph-fault", "model", folder.path());
    let parts = ["read: CUDA_ERROR_ILLEGAL_ADDRESS, at or before a graph of ", " launches, embed_bf16 to "];
    assert!(parts.iter().all(|part| ran.out.contains(part)), "{}", ran.out);
    // With single launches the last kernel is known: the next file is compiled after a wait.
    let ran = run("illegal-address", "model", folder.path());
    assert!(
        ran.out.contains("wait: CUDA_ERROR_ILLEGAL_ADDRESS, at or before ") && !ran.out.contains("graph"),
        "{}",
        ran.out
    );
}

/// The next call of any kind reports the fault: not as a refusal of graphs, and not as a fault of later kernels.
#[test]
fn a_fault_of_a_graph_that_another_call_tells_is_its_own() {
    let Some(folder) = standin_with(&[]) else { return };
    for (work, call) in
        [("again", "cuGraphLaunch"), ("others", "cuGraphExecKernelNodeSetParams"), ("few", "launch")]
    {
        let ran = run("graph-fault", work, folder.path());
        let ends = "at or before a graph of 10 launches, fill to fill";
        let report = format!("{call}: CUDA_ERROR_ILLEGAL_ADDRESS, {ends}");
        assert!(ran.out.contains(&report), "{work}: {}", ran.out);
        assert!(!ran.said.contains("kernel by kernel"), "{work}: {}", ran.said);
    }
}

/// The largest number of graphs at the same time.
fn most_alive(ran: &Ran) -> Option<u32> {
    let alive = |line: &String| line.split_once(", ")?.1.split_once(" alive")?.0.parse::<u32>().ok();
    ran.log.iter().filter_map(alive).max()
}

#[test]
fn few_graphs_are_kept() {
    let Some(folder) = standin_with(&[]) else { return };
    let ran = run("fine", "lists", folder.path());
    // Each list comes twice; the first eight become graphs.
    assert_eq!((ran.out.as_str(), ran.count("# graph"), most_alive(&ran)), ("Ok(())", 8, Some(8)));
}

/// Twenty lists in turn, ten times. All are known from the second time on; then eight of twenty are graphs, and of
/// the other ones one in seventeen is built.
#[test]
fn lists_that_come_back_are_not_built_each_time() {
    let Some(folder) = standin_with(&[]) else { return };
    let (with, without) = (run("fine", "turns", folder.path()), run("graphs-old", "turns", folder.path()));
    let (made, started) = (with.count("# made"), with.count("# graph"));
    println!("{made} graphs made, {started} started");
    let went_without = 9 * 20 - started;
    assert_eq!((with.out.as_str(), made), ("Ok(())", 8 + went_without / 16), "{}", with.said);
    assert!(started > 5 * made, "{made} made, {started} started");
    assert!(with.work() == without.work(), "other kernels than without graphs");
    assert_eq!(most_alive(&with), Some(8));
}

/// Ten lists in turn that do not come again, then two others.
fn phases() -> impl Iterator<Item = u32> {
    (0..4).flat_map(|_| 10..20).chain((0..60).flat_map(|_| [40, 41]))
}

#[test]
fn what_comes_later_and_often_is_a_graph_too() {
    let Some(folder) = standin_with(&[]) else { return };
    let ran = run("fine", "phases", folder.path());
    let last = ran.log.iter().rposition(|line| line.starts_with("# made")).unwrap();
    let after = ran.log[last..].iter().filter(|line| *line == "# graph").count();
    assert!(ran.out == "Ok(())" && after > 60, "the last {after} starts are of graphs that are kept");
}

/// Memory of graphs is not reserved: if memory is short they are freed first, and built again later.
#[test]
fn graphs_give_way_to_memory() {
    let Some(folder) = standin_with(&[]) else { return };
    let (got, want) = (run("graphs-fill-it", "model", folder.path()), run("fine", "model", folder.path()));
    assert_eq!((got.out.starts_with("Ok"), want.count("# made")), (true, 1), "{}", got.out);
    assert!(got.count("# made") > 1 && got.work() == want.work(), "{}", got.said);
    assert!(!got.said.contains("kernel by kernel"), "{}", got.said);
}

#[test]
fn nodes_take_tensor_maps_and_their_shared_memory() {
    let (Some(folder), Some(lacking)) = (standin_with(&[]), standin_with(&["-DNO_GRAPHS"])) else { return };
    let (with, without) = (run("hopper", "wgmma", folder.path()), run("hopper", "wgmma", lacking.path()));
    let products = with.count("product_sm90a_nt ");
    assert_eq!((with.out.as_str(), with.count("# graph"), products), ("Ok(())", 3, 40), "{}", with.said);
    assert!(with.work() == without.work(), "other kernels, arguments or maps");
    let lists: Vec<_> = with.work().into_iter().filter(|line| line.starts_with("product")).collect();
    let rest = |line: &str| line.split_once('[').map(|(_, maps)| maps.split_once(',').unwrap().1.to_string());
    assert!(lists[29] != lists[30] && rest(lists[29]) == rest(lists[30]), "one address differs");
}
