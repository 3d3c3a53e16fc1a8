//! Streamed layers on a GPU: the bits of resident ones, in buffers that are made once. A model with norms of heads, and
//! a classifier.

use crate::case::{self, Case};
use crate::devices;
use finetune::backend::wgpu::Options;
use finetune::backend::{Backend, Wgpu};
use finetune::model::decoder::Build;
use finetune::model::lora::LoraSpec;
use finetune::model::stage::{LossSums, Microbatch, Model, Stage};
use stages::Loads;

fn opened(case: &Case, gpu: Wgpu, build: Build) -> Box<dyn Model> {
    let lora = LoraSpec { dropout: 0.2, ..case.lora.clone() };
    let mut stage = gpu.stage((&case.config, &case.tensors, &lora), build).unwrap();
    stage.set_parameters(&case.adapter("adapter_init")).unwrap();
    stage
}

/// Sums and bits of five microbatches.
fn all(stage: &mut dyn Stage, batches: &[Microbatch]) -> Vec<(LossSums, Vec<u32>)> {
    let (mut got, mut batches) = (Vec::new(), batches.iter().cloned());
    let bits = |gradient: &[f32]| gradient.iter().map(|x| x.to_bits()).collect();
    stage
        .gradients(&mut || batches.next(), &mut |_, sums, gradient| got.push((sums.clone(), bits(gradient))))
        .unwrap();
    got
}

#[test]
fn streamed_layers_have_the_bits_of_resident_ones() {
    for dir in case::golden().into_iter().filter(|dir| dir.ends_with("qwen3") || dir.ends_with("llamacls")) {
        let case = Case::open(&dir);
        let batches: Vec<Microbatch> = (0..5).map(|i| case.microbatch(i, 1 + i % 3)).collect();
        let expected: Vec<_> = devices(Options::default())
            .into_iter()
            .map(|gpu| all(&mut *opened(&case, gpu, Build::whole(&case.config)), &batches))
            .collect();
        for (streamed, group) in [(case.config.layers, 1), (1, 3)] {
            for (gpu, expected) in devices(Options::default()).into_iter().zip(&expected) {
                let what = format!("{} {dir:?}: {streamed} streamed by {group}", gpu.class());
                let build = Build { streamed, group, ..Build::whole(&case.config) };
                let mut stage = opened(&case, gpu, build);
                assert!(all(&mut *stage, &batches) == *expected, "{what}");
                assert!(all(&mut *stage, &batches) == *expected, "{what}, again");
                let mut made = 0;
                for _ in 0..4 {
                    let before = stage.traffic();
                    assert!(all(&mut *stage, &batches[..1]) == expected[..1], "{what}, alone");
                    made = stage.traffic().since(&before).made;
                }
                assert_eq!(made, 0, "{what}: something is made in the steady state");
            }
        }
    }
}
