//! A stage of the bf16 class uses no more of a card's memory than the estimate before it is opened, also if the
//! vocabulary is far wider than all other sizes: then the head dominates, and the copy of its gradient is a third of
//! it.

use crate::device::device_bf16;
use crate::standin::{self, standin_with};
use crate::step::{Same, packed, qwen};
use finetune::backend::cuda::Driver;
use finetune::backend::{Backend, Cuda, Heads};
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Decoder, Keep};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::memory::{Home, Load, estimate};
use finetune::model::stage::Stage;

/// Two query heads of 16 and one key/value head; widths 32 and 48.
fn config(vocab: usize) -> Config {
    qwen(1, vocab, (32, 48), Heads::new(2, 1, 16))
}

fn lora() -> LoraSpec {
    let targets = MODULES.map(String::from).to_vec();
    LoraSpec { rank: 4, alpha: 8.0, targets, seed: 1, ..LoraSpec::none() }
}

/// Bytes in use during the second microbatch of the given rows and length, and the estimate.
fn took<D: Driver>(device: Cuda<D>, vocab: usize, (rows, length): (u32, u32)) -> [u64; 2] {
    let config = config(vocab);
    let build = Build { keep: Keep::Inputs, ..Build::whole(&config) };
    let (target, home, lora) = (device.target(), Home::Own, lora());
    let load = Load { device: target, home, ..Load::of(&config, &lora, (rows * length) as usize, 0) };
    let said = estimate(load, Keep::Inputs).unwrap().in_use;
    let mut stage = Decoder::load(device, &config, &Same::new(config.clone()), &lora, build).unwrap();
    let (mut gradient, batch) = (vec![0.0; stage.layout().len()], packed(vocab, rows, length));
    stage.gradient(&batch, &mut gradient).unwrap();
    stage.in_use();
    stage.gradient(&batch, &mut gradient).unwrap();
    [stage.in_use().unwrap().bytes, said]
}

/// Buffers have exactly the requested bytes.
#[test]
fn a_wide_vocabulary_takes_no_more_than_is_said() {
    let Some(device) = device_bf16() else { return };
    let [took, said] = took(device, 2000, (2, 9));
    println!("{took} bytes in use, {said} said");
    assert!(took <= said && said - took <= said / 8, "{took} bytes in use, {said} said");
}

#[test]
fn inside() {
    if std::env::var_os("STANDIN_WORK").is_some() {
        let device = Cuda::open(0).and_then(Cuda::bf16).unwrap();
        let [took, said] = took(device, 151_936, (4, 100));
        println!("said: {took} {said}");
    }
}

/// Buffers come in the driver's size classes; a real vocabulary, in chunks.
#[test]
fn a_card_takes_no_more_than_is_said() {
    let Some(folder) = standin_with(&[]) else { return };
    let out = standin::child("estimate::inside", "fine", "", folder.path()).out;
    let bytes: Vec<u64> = out.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let [took, said] = bytes[..] else { panic!("{out}") };
    println!("{took} bytes in use, {said} said");
    assert!(took <= said && said - took <= said / 50, "{took} bytes in use, {said} said");
}
