//! Passes in flight: a stage keeps several forward passes open, and texts grow through several stages.

use super::case::{self, Case};
use super::{Try, bits, divides, each_case, gradient, loss};
use finetune::model::decoder::{Build, Keep};
use finetune::model::generate::{choose, generate};
use finetune::model::stage::{
    Fault, LossSums, Microbatch, Model, Output, Sampling, Session, Stage, Ticket, Want,
};
use finetune::numeric::rng::Stream;
use std::collections::BTreeMap;

/// A model as a chain of two stages, or as one.
struct Chain {
    low: Option<Box<dyn Model>>,
    high: Box<dyn Model>,
    /// Number of parameters of the model.
    values: usize,
}

impl Chain {
    fn new(case: &Case, split: Option<usize>, keep: Keep, parameters: &[f32]) -> Self {
        let part = |layers| {
            let build = Build { layers, keep, ..Build::whole(&case.config) };
            Try { build, ..Try::new(case).dropout(0.2) }.stage()
        };
        let layers = case.config.layers;
        let (mut low, mut high) = (split.map(|k| part(0..k)), part(split.unwrap_or(0)..layers));
        for stage in low.iter_mut().chain([&mut high]) {
            let own = stage.span().values;
            stage.set_parameters(&parameters[own]).unwrap();
        }
        Chain { low, high, values: parameters.len() }
    }

    fn forward(&mut self, ticket: u64, batch: &Microbatch) -> LossSums {
        let want = Want::Gradient(Ticket(ticket));
        let hidden = self.low.as_mut().map(|low| match low.forward(batch, None, want).unwrap() {
            Output::Hidden(hidden) => hidden,
            other => panic!("a first stage gives hidden states, not {other:?}"),
        });
        loss(self.high.forward(batch, hidden.as_deref(), want).unwrap())
    }

    fn backward(&mut self, ticket: u64) -> Vec<u32> {
        let mut flat = vec![f32::NAN; self.values];
        let down = self.high.backward(Ticket(ticket), None, &mut flat[self.high.span().values]).unwrap();
        if let Some(low) = &mut self.low {
            let range = low.span().values;
            assert_eq!(low.backward(Ticket(ticket), down.as_deref(), &mut flat[range]).unwrap(), None);
        }
        bits(&flat)
    }

    fn forget(&mut self, ticket: u64) {
        self.low.iter_mut().for_each(|low| low.forget(Ticket(ticket)));
        self.high.forget(Ticket(ticket));
    }
}

/// Random interleavings of forward, backward and forget over up to five open passes.
#[test]
fn passes_in_flight_have_the_bits_of_one_after_the_other() {
    each_case(|case| {
        let parameters = case.adapter("adapter_init");
        let batches: Vec<Microbatch> = (0..6).map(|i| case.microbatch(i, 1 + i % 3)).collect();
        let mut whole = Try::new(case).dropout(0.2).stage();
        let alone: Vec<_> = batches.iter().map(|batch| gradient(&mut *whole, &parameters, batch)).collect();
        let cuts = [0, case.config.layers - 1].into_iter().filter(|k| divides(case, *k)).map(Some);
        let splits = [None].into_iter().chain(cuts);
        let mut draws = Stream::new(&[0x5eed, case.config.layers as u64]);
        for (split, keep) in splits.flat_map(|s| [(s, Keep::Everything), (s, Keep::Inputs)]) {
            let mut chain = Chain::new(case, split, keep, &parameters);
            let mut open: BTreeMap<u64, usize> = BTreeMap::new();
            for ticket in 0..24 {
                let which = draws.below(batches.len() as u32) as usize;
                assert_eq!(chain.forward(ticket, &batches[which]), alone[which].0, "split {split:?}");
                open.insert(ticket, which);
                while open.len() > draws.below(5) as usize {
                    let at = draws.below(open.len() as u32) as usize;
                    let ticket = *open.keys().nth(at).unwrap();
                    let which = open.remove(&ticket).unwrap();
                    match draws.below(4) {
                        0 => chain.forget(ticket),
                        _ => assert!(chain.backward(ticket) == bits(&alone[which].1), "{split:?}, {keep:?}"),
                    }
                }
            }
        }
    });
}

#[test]
fn a_forgotten_pass_leaves_nothing_in_use() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 3));
        let mut stage = Try::new(case).dropout(0.2).stage();
        let rest = |stage: &mut dyn Stage| {
            stage.in_use();
            stage.in_use().unwrap().bytes
        };
        let before = gradient(&mut *stage, &parameters, &batch);
        let empty = rest(&mut *stage);
        for ticket in 1..4 {
            stage.forward(&batch, None, Want::Gradient(Ticket(ticket))).unwrap();
        }
        // The same ticket again frees the values of its earlier pass.
        drop(stage.forward(&batch, None, Want::Gradient(Ticket(2))).unwrap());
        let open = rest(&mut *stage);
        (0..9).for_each(|_| drop(stage.forward(&batch, None, Want::Gradient(Ticket(2))).unwrap()));
        let again = rest(&mut *stage);
        // A buffer that is used again may have more room than it is asked for.
        assert!(again.abs_diff(open) <= open / 100, "{again} bytes in use, {open} before");
        assert!(open > empty);
        (1..4).for_each(|ticket| stage.forget(Ticket(ticket)));
        assert_eq!(rest(&mut *stage), empty);
        let lost = stage.backward(Ticket(2), None, &mut vec![0.0; parameters.len()]);
        assert!(matches!(lost, Err(Fault::Device { .. })), "{lost:?}");
        assert_eq!(gradient(&mut *stage, &parameters, &batch), before);
    });
}

/// Two texts grow in turn through two stages as each grows alone in a whole model.
#[test]
fn texts_grow_through_two_stages_as_through_one() {
    for case in case::golden().iter().map(|dir| Case::open(dir)) {
        if case.config.labels.is_some() {
            continue;
        }
        let parameters = case.adapter("adapter_final");
        let sampling = Sampling { max_new_tokens: 9, temperature: 0.7, top_p: 0.9, seed: 5, stop: vec![] };
        let prompts = [vec![3, 1, 4], vec![1, 5, 9, 2, 6]];
        let mut whole = Chain::new(&case, None, Keep::Inputs, &parameters).high;
        let alone = prompts.each_ref().map(|p| generate(&mut *whole, p, &sampling, &mut |_| true).unwrap());
        for split in (0..case.config.layers).filter(|k| divides(&case, *k)) {
            let mut chain = Chain::new(&case, Some(split), Keep::Inputs, &parameters);
            let low = chain.low.as_mut().unwrap();
            let mut texts = prompts.clone();
            for n in 0..9 {
                for (text, prompt) in texts.iter_mut().zip(&prompts) {
                    let session = Session(prompt.len() as u64);
                    let ids = if n == 0 { &text[..] } else { &text[text.len() - 1..] };
                    let Output::Hidden(hidden) = low.extend(session, ids, None).unwrap() else { panic!() };
                    let made = chain.high.extend(session, ids, Some(&hidden)).unwrap();
                    let Output::Logits(logits) = made else { panic!("{made:?}") };
                    text.push(choose(&logits, &sampling, n));
                }
            }
            for ((text, prompt), alone) in texts.iter().zip(&prompts).zip(&alone) {
                assert_eq!(&text[prompt.len()..], alone, "split {split}");
                let session = Session(prompt.len() as u64);
                low.end(session);
                chain.high.end(session);
            }
        }
    }
}
