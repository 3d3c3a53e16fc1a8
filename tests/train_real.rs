//! The training loop on real small models: it matches PEFT and torch, and gives the same bits for any number of
//! threads, any order of microbatches, any choice of values kept for backward, and any interruption.

#[path = "parity/case.rs"]
mod case;

use case::Case;
use finetune::backend::Cpu;
use finetune::format::{FormatError, peft};
use finetune::model::decoder::{Build, Keep};
use finetune::model::stage::{Microbatch, Sampling};
use finetune::train::checkpoint::{self, Identity, Saving, State};
use finetune::train::event::Event;
use finetune::train::optim::Options;
use finetune::train::schedule::Schedule;
use finetune::train::stop::{Stop, Urgency};
use finetune::train::{Asked, Finished, Local, Run, Sampler, Work, run};
use stages::Loads;
use std::path::Path;

/// The case's rows: `cuts` gives the number of rows of each microbatch of a step, in the order of computation.
struct Rows<'a> {
    case: &'a Case,
    cuts: [usize; 2],
    swapped: bool,
    /// The stop is raised in the middle of this step.
    interrupt: Option<(u64, &'a Stop)>,
}

impl Work for Rows<'_> {
    fn total_steps(&self) -> u64 {
        self.case.number("steps") as u64
    }
    fn steps_per_epoch(&self) -> u64 {
        3
    }
    fn rows(&self) -> u64 {
        self.total_steps() * self.case.number("batch") as u64
    }
    fn step(&self, step: u64) -> Vec<Microbatch> {
        if let Some((at, stop)) = self.interrupt
            && at == step
        {
            stop.ask(Urgency::Now);
        }
        let first = (step as usize - 1) * self.case.number("batch") as usize;
        let [a, b] = self.cuts;
        let mut parts = vec![self.case.microbatch(first, a), self.case.microbatch(first + a, b)];
        parts.iter_mut().for_each(|part| part.step = step);
        if self.swapped {
            parts.reverse();
        }
        parts
    }
    fn eval_rows(&self) -> u64 {
        4
    }
    fn eval_len(&self) -> usize {
        2
    }
    fn eval(&self, index: usize, _: u64) -> Microbatch {
        self.case.microbatch(2 * index, 2)
    }
}

/// The differences between runs that must give the same bits.
#[derive(Clone, Copy)]
struct How {
    threads: usize,
    keep: Keep,
    swapped: bool,
}

const PLAIN: How = How { threads: 2, keep: Keep::Everything, swapped: false };

fn write_adapter(case: &Case, dir: &Path, flat: &[f32]) -> Result<(), FormatError> {
    let config = peft::read(&case.dir.join("adapter_init")).unwrap().config;
    let entry = |e: &finetune::model::layout::Entry| (e.name.clone(), e.rows, e.cols, e.range());
    let entries: Vec<_> = case.layout.entries().iter().map(entry).collect();
    let tensors: Vec<_> = entries
        .iter()
        .map(|(name, rows, cols, range)| {
            let values = &flat[range.clone()];
            peft::TensorRef { name, rows: *rows, cols: *cols, values }
        })
        .collect();
    peft::write(dir, &config, &tensors, &peft::Extras::default())
}

fn train(case: &Case, how: How, out: &Path, stop: (&Stop, Option<u64>)) -> (Finished, Vec<Event>) {
    let build = Build { keep: how.keep, ..Build::whole(&case.config) };
    let mut model = Cpu::new(how.threads).stage((&case.config, &*case.tensors, &case.lora), build).unwrap();
    let batch = case.number("batch") as usize;
    let cuts = [batch / 2, batch - batch / 2];
    let interrupt = stop.1.map(|step| (step, stop.0));
    let work = Rows { case, cuts, swapped: how.swapped, interrupt };
    let options = Options { max_grad_norm: case.number("clip"), ..Options::default() };
    let warmup = case.number("warmup_steps") as u64;
    let schedule =
        Schedule { peak: case.number("lr"), warmup, total: work.total_steps(), ..Schedule::default() };
    let identity = Identity::new(&schedule, &options, &case.layout);
    let (mut state, mut last) = (State::new(case.adapter("adapter_init"), options), None);
    if let Ok(found) = checkpoint::find(out) {
        state = found.load(&case.layout, options, &identity).unwrap();
        last = Some((found.step, found.path));
    }
    let adapter = |dir: &Path, flat: &[f32]| write_adapter(case, dir, flat);
    let sampling = Sampling { max_new_tokens: 3, temperature: 0.0, top_p: 1.0, seed: 1, stop: vec![] };
    let decode = |ids: &[u32]| format!("{ids:?}");
    let prompts = vec![Asked { prompt: "two".into(), ids: vec![5, 6], most: 3, expected: None }];
    let sampler = case.config.labels.is_none().then_some(Sampler { prompts, sampling, decode: &decode });
    let saving = Saving {
        output: out.to_owned(),
        every: 3,
        limit: Some(2),
        identity,
        adapter: &adapter,
        stands: &|| true,
        last,
    };
    let mut events = Vec::new();
    let finished = run(
        Run {
            compute: &mut Local::new(&mut *model, stop.0),
            work: &work,
            state,
            reference: None,
            schedule,
            islands: None,
            delay: 0,
            eval_steps: 2,
            choice: Default::default(),
            saving,
            sampler,
            stop: stop.0,
            labels: vec![],
            notes: vec![],
        },
        &mut |event| events.push(event.clone()),
    );
    (finished.unwrap(), events)
}

fn bits(finished: &Finished) -> Vec<u32> {
    finished.state.parameters.iter().map(|p| p.to_bits()).collect()
}

/// The bounds of contracts/F-FT-002.yaml: loss, gradient norm, adapter.
fn tolerances() -> [f64; 3] {
    let text = include_str!("../contracts/F-FT-002.yaml");
    let contract: serde_json::Value = serde_yaml::from_str(text).unwrap();
    ["loss_relative", "grad_norm_relative", "adapter_absolute"]
        .map(|key| contract["tolerance"][key].as_f64().unwrap())
}

/// The bounds of the parity test hold through the loop too, where sums are fixed-point.
#[test]
fn training_loop_matches_peft() {
    let more = std::env::var_os("FINETUNE_CASES").map_or_else(Vec::new, |dir| case::cases(Path::new(&dir)));
    for dir in case::golden().into_iter().chain(more) {
        let case = Case::open(&dir);
        let out = tempfile::tempdir().unwrap();
        let (finished, events) = train(&case, PLAIN, out.path(), (&Stop::new(), None));
        let steps = events.iter().filter_map(|e| if let Event::Step(s) = e { Some(s) } else { None });
        let log = case.expected["log"].as_array().unwrap();
        let [loss, norm, adapter] = tolerances();
        let mut seen = 0;
        for (got, want) in steps.zip(log) {
            let at = format!("{dir:?} step {}", got.step);
            let number = |key: &str| want[key].as_f64().unwrap();
            assert!((got.loss / number("loss") - 1.0).abs() <= loss, "{at}: loss {}", got.loss);
            assert!(
                (got.grad_norm / number("grad_norm") - 1.0).abs() <= norm,
                "{at}: norm {}",
                got.grad_norm
            );
            assert_eq!(got.tokens as f64, number("tokens"), "{at}");
            seen += 1;
        }
        assert_eq!(seen, log.len());
        for (got, want) in finished.state.parameters.iter().zip(case.adapter("adapter_final")) {
            assert!(f64::from((got - want).abs()) <= adapter, "{dir:?}: {got} for {want}");
        }
        let evals = events.iter().filter_map(|e| if let Event::Eval(e) = e { Some(e) } else { None });
        assert!(evals.clone().count() >= 3);
        for eval in evals {
            assert_eq!(eval.accuracy.is_some(), case.config.labels.is_some());
            assert_eq!(eval.perplexity.is_some(), case.config.labels.is_none());
        }
    }
}

#[test]
fn threads_order_and_recomputation_change_no_bit() {
    for dir in case::golden() {
        let mut case = Case::open(&dir);
        case.lora.dropout = 0.1;
        let run = |how: How| {
            let out = tempfile::tempdir().unwrap();
            bits(&train(&case, how, out.path(), (&Stop::new(), None)).0)
        };
        let reference = run(PLAIN);
        assert_eq!(run(How { threads: 1, ..PLAIN }), reference, "{dir:?}: one thread");
        assert_eq!(run(How { threads: 3, ..PLAIN }), reference, "{dir:?}: three threads");
        assert_eq!(run(How { swapped: true, ..PLAIN }), reference, "{dir:?}: other order");
        assert_eq!(run(How { keep: Keep::Inputs, ..PLAIN }), reference, "{dir:?}: recomputation");

        for step in [1, 2, 4] {
            let out = tempfile::tempdir().unwrap();
            let first = train(&case, PLAIN, out.path(), (&Stop::new(), Some(step))).0;
            assert_eq!((first.complete, first.state.step), (false, step - 1));
            let second = train(&case, PLAIN, out.path(), (&Stop::new(), None)).0;
            assert!(second.complete);
            assert_eq!(bits(&second), reference, "{dir:?}: interrupted in step {step}");
        }
    }
}
