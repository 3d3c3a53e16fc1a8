//! Mixtures of experts.

use super::*;
use finetune::numeric::tensor::{About, Tensor, Tensors};
use stages::Loads;

/// The experts of every layer under other numbers.
struct Renumbered<'a> {
    case: &'a Case,
    count: usize,
}

impl Renumbered<'_> {
    fn of(&self, expert: usize) -> usize {
        (expert * 3 + 1) % self.count
    }
}

impl Tensors for Renumbered<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        if let Some((before, rest)) = name.split_once(".experts.") {
            let (expert, after) = rest.split_once('.').unwrap();
            if let Ok(expert) = expert.parse() {
                let expert = self.of(expert);
                return self.case.tensors.tensor(&format!("{before}.experts.{expert}.{after}"));
            }
        }
        let Some(tensor) = self.case.tensors.tensor(name)? else { return Ok(None) };
        let by_expert = name.contains("mlp.experts.") || name.contains("mlp.router.");
        if !by_expert && !name.ends_with("mlp.gate.weight") {
            return Ok(Some(tensor));
        }
        let size = tensor.bytes.len() / self.count;
        let rows = (0..self.count).map(|expert| &tensor.bytes[self.of(expert) * size..][..size]);
        let bytes = rows.collect::<Vec<_>>().concat().into();
        Ok(Some(Tensor { bytes, ..tensor }))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        self.case.tensors.about(name)
    }

    fn names(&self) -> Vec<String> {
        self.case.tensors.names()
    }
}

#[test]
fn numbers_of_experts_change_no_bit_of_the_loss() {
    let tried = std::cell::Cell::new(0);
    each_case(|case| {
        // 3 divides no other number of experts.
        let Some(count) = case.config.experts.as_ref().map(|of| of.count).filter(|n| n % 3 != 0) else {
            return;
        };
        tried.set(tried.get() + 1);
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 4));
        let (sums, want) = Try::new(case).run(&parameters, &batch);
        let others = Renumbered { case, count };
        let build = Build::whole(&case.config);
        let mut stage = Cpu::new(2).stage((&case.config, &others, &case.lora), build).unwrap();
        let (again, got) = gradient(&mut *stage, &parameters, &batch);
        assert_eq!(again, sums);
        // The gradient through the router is a sum over experts in the order of their numbers.
        let most = want.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-5 * most));
    });
    assert!(tried.get() > 0);
}
