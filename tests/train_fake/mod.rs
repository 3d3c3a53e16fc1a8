//! A stage whose mathematics fits in a line, for tests of the loop: every row pulls the parameters towards a
//! point of its own, loss = sum over rows of |p - point(row)|² / 2, weight = number of rows.

#![allow(dead_code)]

use finetune::backend::Fault;
use finetune::model::layout::Layout;
use finetune::model::stage::{Generate, LossSums, Microbatch, Output, Sampling, Stage, Targets, Want};
use finetune::numeric::rng::Stream;
use finetune::train::Work;

/// Faults and signals that a test plants: what happens at the n-th gradient forward pass, from 1.
pub type Plant<'a> = Box<dyn FnMut(usize, &Microbatch, &mut Vec<f32>) + Send + 'a>;

pub struct Fake<'a> {
    layout: Layout,
    parameters: Vec<f32>,
    gradient: Vec<f32>,
    pub forwards: usize,
    pub plant: Option<Plant<'a>>,
}

impl Fake<'_> {
    pub fn new() -> Self {
        let mut layout = Layout::default();
        layout.push("q.lora_A.weight", 3, 5);
        layout.push("q.lora_B.weight", 7, 3);
        let gradient = vec![0.0; layout.len()];
        Fake { parameters: gradient.clone(), gradient, layout, forwards: 0, plant: None }
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
        "fake-f32".into()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        assert_eq!(flat.len(), self.layout.len());
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
        if want == Want::Gradient {
            self.forwards += 1;
            if let Some(plant) = &mut self.plant {
                plant(self.forwards, batch, &mut self.gradient);
            }
        }
        let rows = batch.rows.len();
        Ok(Output::Loss(LossSums { loss, weight: rows as f64, targets: rows as u64, predictions: vec![] }))
    }

    fn backward(&mut self, _: Option<&[f32]>, gradient: &mut [f32]) -> Result<Option<Vec<f32>>, Fault> {
        gradient.copy_from_slice(&self.gradient);
        Ok(None)
    }
}

impl Generate for Fake<'_> {
    fn generate(
        &mut self,
        prompt: &[u32],
        _: &Sampling,
        each: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, Fault> {
        Ok((1..4).map(|i| prompt.len() as u32 + i).take_while(|&token| each(token)).collect())
    }
}

/// Four microbatches of two rows a step; `order` permutes them.
pub struct Rows {
    pub steps: u64,
    pub order: [usize; 4],
    pub eval: usize,
}

impl Rows {
    pub fn new(steps: u64) -> Self {
        Rows { steps, order: [0, 1, 2, 3], eval: 2 }
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
        self.order.iter().map(|&m| batch(step, two(m))).collect()
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
