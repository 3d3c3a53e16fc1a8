//! A model of one line of arithmetic, for tests of the loop: every row pulls the parameters towards its own point, loss
//! = sum over rows of |p - point(row)|² / 2, weight = number of rows.

#![allow(dead_code)]

use finetune::backend::Fault;
use finetune::format::peft;
use finetune::model::layout::Layout;
use finetune::model::stage::{
    LossSums, Microbatch, Model, Output, Session, Span, Stage, Targets, Ticket, Want,
};
use finetune::numeric::rng::Stream;
use finetune::train::best::Choice;
use finetune::train::checkpoint::{self, DELAY, Identity, OUTER_MOMENTUM, Saving, State};
use finetune::train::event::Event;
use finetune::train::island::Islands;
use finetune::train::optim::Options;
use finetune::train::schedule::Schedule;
use finetune::train::stop::Stop;
use finetune::train::{self, Compute, Finished, Run, TrainError, Work};
use std::path::{Path, PathBuf};

/// Faults and signals that a test plants: called at the n-th gradient forward pass, counted from 1.
pub type Plant<'a> = Box<dyn FnMut(usize, &Microbatch, &mut Vec<f32>) + Send + 'a>;

pub struct Fake<'a> {
    pub layout: Layout,
    pub parameters: Vec<f32>,
    pub gradient: Vec<f32>,
    pub forwards: usize,
    /// Tokens of the text that is being generated.
    pub text: usize,
    pub plant: Option<Plant<'a>>,
    /// The numeric class of its results.
    pub class: &'static str,
    /// The eval loss after a number of steps, instead of the one of the parameters.
    pub score: Option<fn(u64) -> f64>,
    /// The result of setting parameters, called each time.
    pub refuse: Option<Box<dyn FnMut() -> Result<(), Fault> + Send + 'a>>,
}

impl Fake<'_> {
    pub fn new() -> Self {
        let mut layout = Layout::default();
        layout.push("q.lora_A.weight", 3, 5);
        layout.push("q.lora_B.weight", 7, 3);
        let gradient = vec![0.0; layout.len()];
        let (parameters, class) = (gradient.clone(), "fake-f32");
        Fake {
            parameters,
            gradient,
            layout,
            forwards: 0,
            text: 0,
            plant: None,
            class,
            score: None,
            refuse: None,
        }
    }

    pub fn start(&self) -> Vec<f32> {
        let mut draw = Stream::new(&[11]);
        (0..self.layout.len()).map(|_| draw.unit() - 0.5).collect()
    }
}

impl Stage for Fake<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn class(&self) -> String {
        self.class.into()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        assert_eq!(flat.len(), self.layout.len());
        self.refuse.as_mut().map_or(Ok(()), |refuse| refuse())?;
        self.parameters = flat.to_vec();
        Ok(())
    }

    fn forward(&mut self, batch: &Microbatch, _: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        self.gradient.fill(0.0);
        let mut loss = 0.0;
        for row in &batch.rows {
            let mut draw = Stream::new(&[3, *row]);
            for (g, p) in self.gradient.iter_mut().zip(&self.parameters) {
                let d = p - draw.unit();
                *g += d;
                loss += f64::from(d * d / 2.0);
            }
        }
        if want.ticket().is_some() {
            self.forwards += 1;
            if let Some(plant) = &mut self.plant {
                plant(self.forwards, batch, &mut self.gradient);
            }
        }
        let rows = batch.rows.len();
        if let Some(score) = self.score.filter(|_| want.ticket().is_none()) {
            loss = score(batch.step) * rows as f64;
        }
        Ok(Output::Loss(LossSums { loss, weight: rows as f64, targets: rows as u64, ..LossSums::default() }))
    }

    fn backward(
        &mut self,
        _: Ticket,
        _: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Fault> {
        gradient.copy_from_slice(&self.gradient);
        Ok(None)
    }

    fn forget(&mut self, _: Ticket) {}

    fn span(&self) -> Span {
        Span { layers: 0..1, values: 0..self.layout.len(), first: true, last: true }
    }

    fn longest_row(&self) -> usize {
        64
    }

    /// Every answer is one more than the number of tokens so far.
    fn extend_all(&mut self, texts: &[(Session, &[u32])], _: Option<&[f32]>) -> Result<Output, Fault> {
        self.text += texts[0].1.len();
        let mut logits = vec![0.0; 64];
        logits[self.text + 1] = 1.0;
        Ok(Output::Logits(logits))
    }

    fn end(&mut self, _: Session) {
        self.text = 0;
    }
}

/// Four microbatches of two rows a step; `order` permutes them.
pub struct Rows {
    pub steps: u64,
    pub order: [usize; 4],
    pub eval: usize,
    /// Of step s only the microbatches n whose n + s is i modulo k: k and i.
    pub every: (usize, usize),
}

impl Rows {
    pub fn new(steps: u64) -> Self {
        Rows { steps, order: [0, 1, 2, 3], eval: 2, every: (1, 0) }
    }
}

fn batch(step: u64, rows: Vec<u64>) -> Microbatch {
    let tokens = rows.len() as u32;
    Microbatch {
        step,
        ids: vec![1; rows.len()],
        bounds: (0..=tokens).collect(),
        targets: Targets::Tokens(vec![1; rows.len()]),
        rows,
    }
}

impl Work for Rows {
    fn total_steps(&self) -> u64 {
        self.steps
    }
    fn steps_per_epoch(&self) -> u64 {
        4
    }
    fn rows(&self) -> u64 {
        32
    }
    fn step(&self, step: u64) -> Vec<Microbatch> {
        let first = (step - 1) % 4 * 8;
        let two = |m: usize| vec![first + 2 * m as u64, first + 2 * m as u64 + 1];
        let (k, i) = self.every;
        let own = self.order.iter().enumerate().filter(|(n, _)| (n + step as usize) % k == i);
        own.map(|(_, &m)| batch(step, two(m))).collect()
    }
    fn eval_rows(&self) -> u64 {
        self.eval as u64 * 3
    }
    fn eval_len(&self) -> usize {
        self.eval
    }
    fn eval(&self, index: usize, step: u64) -> Microbatch {
        batch(step, (100..103).map(|r| r + 3 * index as u64).collect())
    }
}

/// The setup of one run of the fake.
pub struct Setup<'a> {
    pub work: Rows,
    pub stop: &'a Stop,
    pub output: PathBuf,
    pub every: u64,
    pub limit: Option<usize>,
    pub resume: bool,
    pub peak: f64,
    pub choice: Choice,
    pub islands: Option<Islands>,
    pub delay: u64,
}

pub struct Outcome {
    pub end: Result<Finished, TrainError>,
    pub events: Vec<Event>,
}

impl<'a> Setup<'a> {
    pub fn new(steps: u64, stop: &'a Stop, output: &Path) -> Self {
        let work = Rows::new(steps);
        let (output, choice, islands, delay) = (output.to_owned(), Choice::default(), None, 0);
        Setup { work, stop, output, every: 0, limit: None, resume: false, peak: 0.05, choice, islands, delay }
    }

    pub fn run(&self, model: &mut dyn Model) -> Outcome {
        self.run_by(&mut train::Local::new(model, self.stop).delayed(self.delay))
    }

    /// Runs with any `Compute`.
    pub fn run_by(&self, compute: &mut dyn Compute) -> Outcome {
        let mut events = Vec::new();
        let end = self.start(compute, &mut |event| events.push(event.clone()));
        Outcome { end, events }
    }

    fn start(
        &self,
        compute: &mut dyn Compute,
        events: &mut dyn FnMut(&Event),
    ) -> Result<Finished, TrainError> {
        let layout = compute.layout().clone();
        let options = Options::default();
        let schedule = Schedule { peak: self.peak, warmup: 1, total: self.work.steps, ..Schedule::default() };
        let momentum = self.islands.map(|islands| islands.outer.momentum).filter(|momentum| *momentum > 0.0);
        let identity = Identity::new(&schedule, &options, &layout).with("rows", "abc");
        let identity = identity.with_some(OUTER_MOMENTUM, momentum);
        let identity = identity.with_some(DELAY, Some(self.delay).filter(|delay| *delay > 0));
        let (mut state, mut last) = (State::new(Fake::new().start(), options), None);
        if self.resume {
            let checkpoint = checkpoint::find(&self.output)?;
            state = checkpoint.load(&layout, options, &identity)?;
            last = Some((checkpoint.step, checkpoint.path));
        }
        let adapter = |dir: &Path, flat: &[f32]| {
            let tensors: Vec<_> = layout
                .entries()
                .iter()
                .map(|e| peft::TensorRef {
                    name: &e.name,
                    rows: e.rows,
                    cols: e.cols,
                    values: &flat[e.range()],
                })
                .collect();
            peft::write(dir, &adapter_config(), &tensors, &peft::Extras::default())
        };
        let (output, every, limit) = (self.output.clone(), self.every, self.limit);
        let saving = Saving { output, every, limit, identity, adapter: &adapter, stands: &|| true, last };
        let (work, stop) = (&self.work, self.stop);
        let (labels, notes, choice) = (vec![], vec![], self.choice);
        let (eval_steps, sampler) = (3, None);
        let run = Run {
            compute,
            work,
            state,
            reference: None,
            schedule,
            islands: self.islands,
            delay: self.delay,
            eval_steps,
            choice,
            saving,
            sampler,
            stop,
            labels,
            notes,
        };
        train::run(run, events)
    }
}

fn adapter_config() -> peft::AdapterConfig {
    peft::AdapterConfig {
        task: peft::TaskType::CausalLm,
        base_model_name_or_path: None,
        revision: None,
        r: 3,
        lora_alpha: 6.0,
        lora_dropout: 0.0,
        target_modules: vec!["q_proj".into()],
        layers: Vec::new(),
        rank_pattern: Vec::new(),
        alpha_pattern: Vec::new(),
        token_rows: vec![],
        path: "",
        use_rslora: false,
        use_dora: false,
    }
}

impl Outcome {
    pub fn bits(&self) -> Vec<u32> {
        self.end.as_ref().unwrap().state.parameters.iter().map(|p| p.to_bits()).collect()
    }

    pub fn losses(&self) -> Vec<f64> {
        self.events.iter().filter_map(|e| if let Event::Step(s) = e { Some(s.loss) } else { None }).collect()
    }

    /// `step3 eval3 ...`
    pub fn kinds(&self) -> String {
        let kind = |e: &Event| {
            let value = serde_json::to_value(e).unwrap();
            assert_eq!(serde_json::from_value::<Event>(value.clone()).unwrap(), *e, "read back");
            format!("{}{}", value["event"].as_str().unwrap(), e.step())
        };
        self.events.iter().map(kind).collect::<Vec<_>>().join(" ")
    }
}
