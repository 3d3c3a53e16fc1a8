//! Streamed blocks: a stage whose lowest blocks are read again for each pass computes what a resident stage computes.

use super::case::{self, Case};
use super::{Try, bits, each_case, gradient, loss};
use finetune::backend::Cpu;
use finetune::model::decoder::{Build, Keep};
use finetune::model::generate::generate;
use finetune::model::stage::{
    Fault, LossSums, Microbatch, Model, Output, Sampling, Session, Stage, Ticket, Want,
};
use finetune::numeric::block::Blocks;
use finetune::numeric::tensor::{About, Tensor, Tensors};
use stages::Loads;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Counts how often each tensor is read, and fails on demand.
struct Counted {
    inner: Arc<dyn Tensors>,
    read: Mutex<BTreeMap<String, usize>>,
    /// Layer that was read last.
    layer: Mutex<String>,
    /// Number of layers that can still be read.
    left: AtomicUsize,
    /// Whether experts cannot be read.
    lacks_experts: AtomicBool,
}

/// The layer of a tensor, as `layers.1`.
fn layer_of(name: &str) -> Option<String> {
    let mut parts = name.split('.').skip_while(|part| *part != "layers");
    Some(format!("{}.{}", parts.next()?, parts.next()?))
}

impl Counted {
    fn new(case: &Case) -> Arc<Self> {
        Arc::new(Counted {
            inner: case.tensors.clone(),
            read: Mutex::default(),
            layer: Mutex::default(),
            left: AtomicUsize::new(usize::MAX),
            lacks_experts: AtomicBool::new(false),
        })
    }

    fn lacks(&self, name: &str) -> Result<(), String> {
        // The biases of all experts are read with the block.
        let of_one = name.contains(".experts.") && name.ends_with(".weight");
        match of_one && self.lacks_experts.load(Ordering::Relaxed) {
            true => Err("the experts are gone".into()),
            false => Ok(()),
        }
    }

    /// Reads of each expert of layer i since they were counted last, ascending.
    fn experts(&self, i: usize) -> Vec<usize> {
        let read = self.read.lock().unwrap();
        let layer = format!("layers.{i}.mlp.experts.");
        let of_one = |name: &str| name.contains(&layer) && name.ends_with("down_proj.weight");
        let mut counts: Vec<usize> = read.iter().filter(|(name, _)| of_one(name)).map(|(_, n)| *n).collect();
        counts.sort();
        counts
    }

    /// Reads of layer i's attention output since the last call.
    fn reads(&self, layers: usize) -> Vec<usize> {
        let read = std::mem::take(&mut *self.read.lock().unwrap());
        // Of a convolution its output.
        let is_output =
            |name: &str| ["o_proj.weight", "out_proj.weight"].iter().any(|end| name.ends_with(end));
        let of = |i: usize, name: &str| name.contains(&format!("layers.{i}.")) && is_output(name);
        let count = |i| read.iter().filter(|(name, _)| of(i, name)).map(|(_, n)| n).sum();
        (0..layers).map(count).collect()
    }
}

impl Tensors for Counted {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        self.lacks(name)?;
        let mut last = self.layer.lock().unwrap();
        if let Some(layer) = layer_of(name).filter(|layer| *layer != *last) {
            let Some(left) = self.left.load(Ordering::Relaxed).checked_sub(1) else {
                last.clear();
                return Err("the disk is gone".into());
            };
            self.left.store(left, Ordering::Relaxed);
            *last = layer;
        }
        *self.read.lock().unwrap().entry(name.to_owned()).or_default() += 1;
        self.inner.tensor(name)
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        self.lacks(name)?;
        let blocks = self.inner.blocks(name)?;
        if blocks.is_some() {
            *self.read.lock().unwrap().entry(name.to_owned()).or_default() += 1;
        }
        Ok(blocks)
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        self.inner.about(name)
    }

    fn names(&self) -> Vec<String> {
        self.inner.names()
    }
}

fn streamed(
    case: &Case,
    source: Arc<dyn Tensors>,
    away: usize,
    (keep, make): (Keep, fn(usize) -> Cpu),
) -> Box<dyn Model> {
    let build = Build { keep, streamed: away, ..Build::whole(&case.config) };
    let Try { config, lora, .. } = Try::new(case).dropout(0.2);
    make(2).poisoning().stage((&config, &source, &lora), build).unwrap()
}

#[test]
fn a_streamed_stage_has_the_bits_of_a_resident_one() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 4));
        for make in [Cpu::new as fn(usize) -> Cpu, Cpu::bf16] {
            let mut resident = Try { make, ..Try::new(case).dropout(0.2) }.stage();
            let expected = gradient(&mut *resident, &parameters, &batch);
            let evaluated = resident.forward(&batch, None, Want::Loss).unwrap();
            for (away, keep) in
                (1..=case.config.layers + 1).flat_map(|n| [(n, Keep::Everything), (n, Keep::Inputs)])
            {
                let mut stage = streamed(case, case.tensors.clone(), away, (keep, make));
                for _ in 0..2 {
                    let (sums, flat) = gradient(&mut *stage, &parameters, &batch);
                    assert_eq!(sums, expected.0);
                    assert!(bits(&flat) == bits(&expected.1), "{away} streamed, {keep:?}");
                }
                assert_eq!(stage.forward(&batch, None, Want::Loss).unwrap(), evaluated);
            }
        }
    });
}

#[test]
fn streamed_texts_equal_resident_ones() {
    for case in case::golden().iter().map(|dir| Case::open(dir)).filter(|case| case.config.labels.is_none()) {
        let parameters = case.adapter("adapter_final");
        let sampling = Sampling { max_new_tokens: 9, temperature: 0.7, top_p: 0.9, seed: 5, stop: vec![] };
        let mut resident = Try::new(&case).stage();
        resident.set_parameters(&parameters).unwrap();
        let expected = generate(&mut *resident, &[3, 1, 4], &sampling, &mut |_| true).unwrap();
        for away in 1..=case.config.layers {
            let mut stage = streamed(&case, case.tensors.clone(), away, (Keep::Inputs, Cpu::new));
            stage.set_parameters(&parameters).unwrap();
            assert_eq!(
                generate(&mut *stage, &[3, 1, 4], &sampling, &mut |_| true).unwrap(),
                expected,
                "{away} streamed"
            );
        }
    }
}

/// Number of blocks below the lowest trained value, which have no backward pass.
fn bare(case: &Case) -> usize {
    if !case.lora.rows.embedding.is_empty() || case.lora.ends.embedding.is_some() {
        return 0;
    }
    let has =
        |layer: &usize| case.lora.targets.iter().any(|module| case.lora.adapter(*layer, module).is_some());
    (0..case.config.layers).take_while(|layer| !has(layer)).count()
}

/// Adds the reads of the lowest `away` blocks in a pass up and a pass down. The slot holds the block of the last visit.
fn add_reads(reads: &mut [usize], (away, bare): (usize, usize), slot: &mut Option<usize>) {
    for block in (0..away).chain((bare..away).rev()) {
        reads[block] += usize::from(slot.replace(block) != Some(block));
    }
}

#[test]
fn each_pass_reads_each_streamed_block_once() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 2));
        let layers = case.config.layers;
        for away in 1..=layers {
            let source = Counted::new(case);
            let mut stage = streamed(case, source.clone(), away, (Keep::Inputs, Cpu::new));
            assert_eq!(source.reads(layers), vec![1; layers], "opening checks every block");
            let mut slot = None;
            for turn in 0..2 {
                gradient(&mut *stage, &parameters, &batch);
                let mut expected = vec![0; layers];
                add_reads(&mut expected, (away, bare(case)), &mut slot);
                assert_eq!(source.reads(layers), expected, "{away} streamed, {turn}");
            }
        }
    });
}

/// Sums and bits of all microbatches.
fn all(stage: &mut dyn Stage, batches: &[Microbatch]) -> Result<Vec<(LossSums, Vec<u32>)>, Fault> {
    let (mut got, mut batches) = (Vec::new(), batches.iter().cloned());
    let each = &mut |index, sums: &LossSums, gradient: &[f32]| {
        assert_eq!(index, got.len(), "in order");
        got.push((sums.clone(), bits(gradient)));
    };
    stage.gradients(&mut || batches.next(), each)?;
    Ok(got)
}

/// Seven microbatches in groups of four: the last group has three.
#[test]
fn a_group_has_the_same_bits_and_reads_each_streamed_block_once_in_each_direction() {
    each_case(|case| {
        let parameters = case.adapter("adapter_init");
        let batches: Vec<Microbatch> = (0..7).map(|i| case.microbatch(i, 1 + i % 3)).collect();
        let layers = case.config.layers;
        for (keep, make) in [(Keep::Everything, Cpu::new as fn(usize) -> Cpu), (Keep::Inputs, Cpu::bf16)] {
            let mut resident = Try { make, ..Try::new(case).dropout(0.2) }.stage();
            resident.set_parameters(&parameters).unwrap();
            let expected = all(&mut *resident, &batches).unwrap();
            for away in 1..=layers {
                let source = Counted::new(case);
                let build = Build { keep, streamed: away, group: 4, ..Build::whole(&case.config) };
                let Try { config, lora, .. } = Try::new(case).dropout(0.2);
                let tensors: Arc<dyn Tensors> = source.clone();
                let cpu = make(2).poisoning();
                let mut stage = cpu.stage((&config, &tensors, &lora), build).unwrap();
                stage.set_parameters(&parameters).unwrap();
                assert_eq!((stage.together(), resident.together()), (4, 1));
                source.reads(layers);
                let mut slot = None;
                for turn in 0..2 {
                    assert!(all(&mut *stage, &batches).unwrap() == expected, "{away} streamed, {keep:?}");
                    let mut reads = vec![0; layers];
                    (0..2).for_each(|_| add_reads(&mut reads, (away, bare(case)), &mut slot));
                    assert_eq!(source.reads(layers), reads, "{away} streamed, {turn}");
                }
                stage.in_use();
                let rest = stage.in_use().unwrap().bytes;
                let mut faults = 0;
                for left in 0.. {
                    source.left.store(left, Ordering::Relaxed);
                    if all(&mut *stage, &batches).is_ok() {
                        break;
                    }
                    faults += 1;
                }
                // The slot is empty after the first fault. A single block is in it already, and nothing is read.
                let (mut reads, mut slot) = (vec![0; layers], None);
                (0..2).for_each(|_| add_reads(&mut reads, (away, bare(case)), &mut slot));
                let expected_faults = if away > 1 { reads.iter().sum() } else { 0 };
                assert_eq!(faults, expected_faults, "each read can fail");
                source.left.store(usize::MAX, Ordering::Relaxed);
                let mut bad = batches.clone();
                bad[5].ids[0] = u32::MAX;
                assert!(all(&mut *stage, &bad).is_err(), "an invalid microbatch in the second group");
                assert!(all(&mut *stage, &batches).unwrap() == expected, "after faults");
                stage.in_use();
                let after = stage.in_use().unwrap().bytes;
                assert!(
                    after.abs_diff(rest) <= spare(case),
                    "{after} bytes in use, {rest} before: faults leave nothing"
                );
            }
        }
    });
}

/// Bytes by which the memory of the same blocks may differ: small vectors of the block in the slot (those of a delta rule: rates,
/// a gain, lengths) may be in buffers with more room than they need.
fn spare(case: &Case) -> u64 {
    if case.config.delta_rules.is_some() { 192 } else { 0 }
}

#[test]
fn a_block_that_cannot_be_read_is_a_fault_and_leaves_nothing() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 2));
        let source = Counted::new(case);
        let mut stage = streamed(case, source.clone(), case.config.layers, (Keep::Inputs, Cpu::new));
        let expected = gradient(&mut *stage, &parameters, &batch);
        let rest = |stage: &mut dyn Stage| {
            stage.in_use();
            stage.in_use().unwrap().bytes
        };
        let break_it = |broken| source.left.store(if broken { 0 } else { usize::MAX }, Ordering::Relaxed);
        let empty = rest(&mut *stage);
        let lost = |fault: Fault| assert!(fault.to_string().contains("the disk is gone"), "{fault}");
        // So often that the smallest buffer, left each time, would be more than what may be spare.
        for _ in 0..9 {
            break_it(true);
            lost(stage.forward(&batch, None, Want::Gradient(Ticket(1))).unwrap_err());
            break_it(false);
            loss(stage.forward(&batch, None, Want::Gradient(Ticket(1))).unwrap());
            break_it(true);
            lost(stage.backward(Ticket(1), None, &mut vec![0.0; parameters.len()]).unwrap_err());
            if case.config.labels.is_none() {
                lost(stage.extend(Session(0), &[1, 2], None).unwrap_err());
                break_it(false);
                stage.end(Session(0));
                assert!(matches!(stage.extend(Session(0), &[1, 2], None).unwrap(), Output::Logits(_)));
                stage.end(Session(0));
            }
        }
        break_it(false);
        assert_eq!(gradient(&mut *stage, &parameters, &batch), expected);
        let again = rest(&mut *stage);
        assert!(again.abs_diff(empty) <= spare(case).max(64), "{again} bytes in use, {empty} before");
    });
}

/// A pass reads the experts that its tokens choose, each once; those of a token that is alone are the chosen ones.
#[test]
fn streamed_layers_read_chosen_experts_alone() {
    let tried = std::cell::Cell::new(0);
    each_case(|case| {
        let Some(of) = case.config.experts.clone().filter(|_| case.config.labels.is_none()) else { return };
        tried.set(tried.get() + 1);
        let layers = case.config.layers;
        let sparse: Vec<usize> =
            (0..layers).filter(|layer| case.config.experts_of(*layer).is_some()).collect();
        let source = Counted::new(case);
        let mut stage = streamed(case, source.clone(), layers, (Keep::Inputs, Cpu::new));
        sparse.iter().for_each(|i| assert_eq!(source.experts(*i), vec![1; of.count], "opening checks all"));
        let parameters = case.adapter("adapter_init");
        stage.set_parameters(&parameters).unwrap();
        for ids in [&[3, 1, 4][..], &[1], &[5]] {
            source.reads(layers);
            stage.extend(Session(0), ids, None).unwrap();
            for i in &sparse {
                let reads = source.experts(*i);
                let most = (ids.len() * of.chosen).min(of.count);
                assert!(
                    reads.iter().all(|n| *n == 1) && (of.chosen..=most).contains(&reads.len()),
                    "{reads:?}"
                );
            }
        }
        stage.end(Session(0));
        let batch = case.microbatch(0, 2);
        let expected = gradient(&mut *stage, &parameters, &batch);
        let mut rest = Vec::new();
        // The experts of a layer are read in another order after a fault, so buffers of other sizes may be taken again.
        for _ in 0..9 {
            source.lacks_experts.store(true, Ordering::Relaxed);
            let lost = |fault: Fault| assert!(fault.to_string().contains("the experts are gone"), "{fault}");
            lost(stage.forward(&batch, None, Want::Gradient(Ticket(1))).unwrap_err());
            lost(stage.extend(Session(0), &[1, 2], None).unwrap_err());
            source.lacks_experts.store(false, Ordering::Relaxed);
            stage.end(Session(0));
            assert_eq!(gradient(&mut *stage, &parameters, &batch), expected);
            stage.in_use();
            rest.push(stage.in_use().unwrap().bytes);
        }
        assert!(rest[8].abs_diff(rest[1]) <= spare(case), "bytes in use after each fault: {rest:?}");
    });
    assert!(tried.get() > 0);
}
