//! Statements: what holds in branches and behind them, and loops.

use super::{Flow, Frame, Proof, Root, Value};
use crate::linear::{Linear, MOST};
use naga::{BinaryOperator, Expression, Handle, Statement};
use std::collections::{BTreeMap, HashMap};

/// A variable that only grows in a loop.
pub(super) struct Growing {
    pub variable: Handle<naga::LocalVariable>,
    /// Its value at the start of a pass.
    pub at: Linear,
    /// The unknown in it that counts passes.
    pub count: usize,
}

impl<'a> Proof<'a> {
    pub(super) fn block(&mut self, frame: &mut Frame<'a>, block: &'a naga::Block) -> Flow {
        for statement in block.iter() {
            if self.statement(frame, statement) == Flow::Ended {
                return Flow::Ended;
            }
        }
        Flow::On
    }

    fn statement(&mut self, frame: &mut Frame<'a>, statement: &'a Statement) -> Flow {
        match statement {
            Statement::Emit(range) => {
                for handle in range.clone() {
                    let value = self.computed(frame, handle);
                    frame.values.insert(handle, value);
                }
            }
            Statement::Block(block) => return self.block(frame, block),
            Statement::If { condition, accept, reject } => {
                return self.branch(frame, *condition, [accept, reject]);
            }
            Statement::Loop { body, continuing, break_if: None } => self.passes(frame, body, continuing),
            Statement::Store { pointer, value } => self.store(frame, *pointer, *value),
            Statement::Call { function, arguments, result } => {
                let arguments = arguments.iter().map(|a| self.value(frame, *a)).collect();
                let value = self.call(&self.module.functions[*function], &self.info[*function], arguments);
                result.iter().for_each(|handle| drop(frame.values.insert(*handle, value.clone())));
            }
            Statement::Return { value } => {
                let value = value.map_or(Value::Any, |handle| self.value(frame, handle));
                frame.returned.push(value);
                return Flow::Ended;
            }
            Statement::Break => return Flow::Ended,
            Statement::ControlBarrier(_) | Statement::MemoryBarrier(_) => {}
            Statement::CooperativeStore { target, data } => self.fragment(frame, *target, data),
            Statement::SubgroupGather { result, .. }
            | Statement::SubgroupCollectiveOperation { result, .. } => {
                let value = self.any(frame.info[*result].ty.inner_with(&self.module.types));
                frame.values.insert(*result, value);
            }
            other => self.doubts.push(format!("a statement that is not followed: {other:?}")),
        }
        Flow::On
    }

    /// Both branches of a condition; what holds behind them is that of the one from which there is a way there.
    fn branch(
        &mut self,
        frame: &mut Frame<'a>,
        condition: Handle<Expression>,
        ways: [&'a naga::Block; 2],
    ) -> Flow {
        let (yes, no) = match self.value(frame, condition) {
            Value::Truth(yes, no) => (yes, no),
            _ => (Some(Vec::new()), Some(Vec::new())),
        };
        let (mark, before) = (self.known.mark(), frame.locals.clone());
        let mut ends = Vec::new();
        for (facts, way) in [yes, no].into_iter().zip(ways) {
            let Some(facts) = facts else { continue };
            frame.locals = before.clone();
            self.known.assume(&facts);
            if self.block(frame, way) == Flow::On {
                let mut locals = std::mem::take(&mut frame.locals);
                // What is true or false only on this way holds with its condition: so is `a && b` written.
                for (handle, value) in &mut locals {
                    if let Value::Truth(yes, no) = value
                        && before.get(handle) != Some(&Value::Truth(yes.clone(), no.clone()))
                    {
                        yes.iter_mut().chain(no).for_each(|known| known.extend(facts.iter().cloned()));
                    }
                }
                ends.push((locals, facts));
            }
            self.known.back(mark);
        }
        let Some((mut locals, facts)) = ends.pop() else { return Flow::Ended };
        match ends.pop() {
            None => self.known.assume(&facts),
            Some((other, _)) => {
                for (handle, value) in other {
                    let joined = self.either(locals[&handle].clone(), value);
                    locals.insert(handle, joined);
                }
            }
        }
        frame.locals = locals;
        Flow::On
    }

    /// A loop: its body once, for any pass.
    fn passes(&mut self, frame: &mut Frame<'a>, body: &'a naga::Block, continuing: &'a naga::Block) {
        let mut stores = Vec::new();
        stored(body, frame.function, &mut stores);
        stored(continuing, frame.function, &mut stores);
        let (mark, first, outer) = (self.known.mark(), self.known.next(), frame.growing.len());
        let variables: BTreeMap<_, Vec<_>> =
            stores.iter().fold(BTreeMap::new(), |mut all, (variable, value)| {
                all.entry(*variable).or_insert_with(Vec::new).push(*value);
                all
            });
        let mut least = HashMap::new();
        for (variable, values) in &variables {
            let entry = frame.locals[variable].clone();
            if let Value::Ints(ints) = &entry {
                least.insert(*variable, self.known.least(&ints[0]).max(0));
            }
            let value = self.of_any_pass(frame, (*variable, values), entry);
            frame.locals.insert(*variable, value);
        }
        let start = self.known.mark();
        let mut ends = false;
        let mut flow = Flow::On;
        for statement in body.iter() {
            flow = self.statement(frame, statement);
            // What holds behind an exit of the loop itself bounds a variable that grows.
            let bounded =
                |g: &Growing| self.known.since(start).iter().any(|fact| fact.bounds(g.count, first));
            ends |= matches!(statement, Statement::If { .. }) && frame.growing[outer..].iter().any(bounded);
            if flow == Flow::Ended {
                break;
            }
        }
        if flow == Flow::On {
            self.block(frame, continuing);
        }
        if !ends {
            let names = variables.keys().map(|v| frame.function.local_variables[*v].name.clone());
            self.doubts.push(format!("a loop over {:?} has no bound", names.flatten().collect::<Vec<_>>()));
        }
        frame.growing.truncate(outer);
        self.known.back(mark);
        // Behind the loop they have some value; one that grows is not below that of before.
        for (variable, values) in variables {
            let grows = values.iter().all(|value| added(frame.function, variable, *value).is_some());
            let value = match least.get(&variable).filter(|_| grows) {
                Some(least) => Value::Ints(vec![self.known.unknown(*least, MOST)]),
                None => self.any(&self.module.types[frame.function.local_variables[variable].ty].inner),
            };
            frame.locals.insert(variable, value);
        }
    }

    /// The value of a variable at the start of any pass of a loop that stores these values.
    fn of_any_pass(
        &mut self,
        frame: &mut Frame<'a>,
        (variable, values): (Handle<naga::LocalVariable>, &[Handle<Expression>]),
        entry: Value,
    ) -> Value {
        let ty = &self.module.types[frame.function.local_variables[variable].ty].inner;
        let steps: Option<Vec<_>> =
            values.iter().map(|value| added(frame.function, variable, *value)).collect();
        let (Value::Ints(entry), Some(steps)) = (entry, steps) else { return self.any(ty) };
        let [entry] = &entry[..] else { return self.any(ty) };
        // One known step: entry + step x passes. Otherwise anything from the entry on.
        let step = match steps[..] {
            [step] => self.ints(frame, step).and_then(|step| step[0].known()).filter(|step| *step > 0),
            _ => None,
        };
        let passes = self.known.unknown(0, MOST / step.unwrap_or(1));
        let at = entry.plus(&passes, step.unwrap_or(1));
        self.known.assume(&[at.plus(&Linear::of(MOST), -1)]);
        frame.growing.push(Growing { variable, at: at.clone(), count: self.known.next() - 1 });
        Value::Ints(vec![at])
    }

    fn store(&mut self, frame: &mut Frame<'a>, pointer: Handle<Expression>, value: Handle<Expression>) {
        let (place, value) = (self.value(frame, pointer), self.value(frame, value));
        let Value::Place(Root::Local(variable), at, part) = place else { return };
        if at.is_some() || part.is_some() {
            // An integer or a condition that changes in part is not followed.
            if matches!(frame.locals.get(&variable), Some(Value::Ints(_) | Value::Truth(..))) {
                self.doubt(frame, pointer, "a store into a part of a variable that is followed");
            }
            return;
        }
        let grown = frame.growing.iter().rev().find(|g| g.variable == variable).map(|g| g.at.clone());
        if let (Some(at), Value::Ints(ints)) = (grown, &value)
            && !self.known.at_least(&ints[0].plus(&at, -1), 1)
        {
            self.doubt(frame, pointer, "a loop's variable that may not grow");
        }
        frame.locals.insert(variable, value);
    }
}

/// What a value is more than the variable, if it is a sum of both.
fn added(
    function: &naga::Function,
    variable: Handle<naga::LocalVariable>,
    value: Handle<Expression>,
) -> Option<Handle<Expression>> {
    let own = |side: Handle<Expression>| match function.expressions[side] {
        Expression::Load { pointer } => function.expressions[pointer] == Expression::LocalVariable(variable),
        _ => false,
    };
    match function.expressions[value] {
        Expression::Binary { op: BinaryOperator::Add, left, right } if own(left) => Some(right),
        Expression::Binary { op: BinaryOperator::Add, left, right } if own(right) => Some(left),
        _ => None,
    }
}

/// The variables that a block stores, each with the value.
fn stored(
    block: &naga::Block,
    function: &naga::Function,
    found: &mut Vec<(Handle<naga::LocalVariable>, Handle<Expression>)>,
) {
    for statement in block.iter() {
        match statement {
            Statement::Store { pointer, value } => {
                if let Expression::LocalVariable(variable) = function.expressions[*pointer] {
                    found.push((variable, *value));
                }
            }
            Statement::Block(block) => stored(block, function, found),
            Statement::If { accept, reject, .. } => {
                [accept, reject].into_iter().for_each(|block| stored(block, function, found));
            }
            Statement::Loop { body, continuing, .. } => {
                [body, continuing].into_iter().for_each(|block| stored(block, function, found));
            }
            _ => {}
        }
    }
}
