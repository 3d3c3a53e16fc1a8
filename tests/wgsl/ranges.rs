//! Proves of a kernel's text, for given sizes, that every index is inside its array, for all workgroups and lanes at once,
//! and that every loop ends. Whole numbers are sums of unknowns (tests/wgsl/linear.rs); numbers with a fraction are not
//! followed. Functions are followed at each of their calls.

mod flow;

use crate::linear::{Known, Linear, MOST};
use flow::Growing;
use naga::valid::{FunctionInfo, ModuleInfo};
use naga::{BinaryOperator as Op, Expression, Handle, Literal, MathFunction, ScalarKind, TypeInner};
use std::collections::{BTreeMap, HashMap};

/// Sizes of a run.
#[derive(Debug, Default)]
pub struct Sizes {
    /// Whole numbers of the kernel's parameters, by name.
    pub params: BTreeMap<&'static str, u32>,
    /// Elements of each buffer, and the largest whole number in it.
    pub buffers: BTreeMap<&'static str, (u32, u32)>,
    /// Number of workgroups.
    pub groups: u32,
}

/// Inequalities: sums that are at most 0.
type Facts = Vec<Linear>;

#[derive(Debug, Clone, PartialEq)]
enum Value {
    /// A whole number, or a vector of them.
    Ints(Vec<Linear>),
    /// What holds if it is true, and if it is false; `None` if it never is.
    Truth(Option<Facts>, Option<Facts>),
    /// A variable, the element of an array in it, or a member.
    Place(Root, Option<Linear>, Option<u32>),
    /// A number with a fraction, a matrix, an array of such.
    Any,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Root {
    Global(Handle<naga::GlobalVariable>),
    Local(Handle<naga::LocalVariable>),
}

/// Whether the statements behind are reached.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Flow {
    On,
    Ended,
}

struct Frame<'a> {
    function: &'a naga::Function,
    info: &'a FunctionInfo,
    values: HashMap<Handle<Expression>, Value>,
    arguments: Vec<Value>,
    locals: HashMap<Handle<naga::LocalVariable>, Value>,
    returned: Vec<Value>,
    growing: Vec<Growing>,
}

pub struct Proof<'a> {
    module: &'a naga::Module,
    info: &'a ModuleInfo,
    text: &'a str,
    sizes: &'a Sizes,
    known: Known,
    /// What could not be proved.
    pub doubts: Vec<String>,
}

/// What could not be proved of a text.
pub fn doubts(text: &str, (module, info): &(naga::Module, ModuleInfo), sizes: &Sizes) -> Vec<String> {
    let mut proof = Proof { module, info, text, sizes, known: Known::default(), doubts: Vec::new() };
    let entry = &module.entry_points[0];
    let lanes = i128::from(entry.workgroup_size[0]);
    let arguments =
        entry.function.arguments.iter().map(|a| proof.built_in(a.binding.as_ref(), lanes)).collect();
    proof.call(&entry.function, info.get_entry_point(0), arguments);
    proof.doubts.sort();
    proof.doubts.dedup();
    proof.doubts
}

impl<'a> Proof<'a> {
    fn built_in(&mut self, binding: Option<&naga::Binding>, lanes: i128) -> Value {
        let groups = i128::from(self.sizes.groups);
        let Some(naga::Binding::BuiltIn(what)) = binding else { return Value::Any };
        let known = &mut self.known;
        Value::Ints(match what {
            naga::BuiltIn::WorkGroupId => vec![known.unknown(0, groups - 1), Linear::of(0), Linear::of(0)],
            naga::BuiltIn::NumWorkGroups => vec![Linear::of(groups), Linear::of(1), Linear::of(1)],
            naga::BuiltIn::NumSubgroups => vec![known.unknown(1, lanes)],
            _ => vec![known.unknown(0, lanes - 1)],
        })
    }

    fn doubt(&mut self, frame: &Frame, at: Handle<Expression>, why: &str) {
        let line = frame.function.expressions.get_span(at).location(self.text).line_number;
        let code = self.text.lines().nth(line as usize - 1).unwrap_or_default().trim();
        self.doubts.push(format!("line {line}: {why}: {code}"));
    }

    fn call(&mut self, function: &'a naga::Function, info: &'a FunctionInfo, arguments: Vec<Value>) -> Value {
        let (values, locals, returned) = (HashMap::new(), HashMap::new(), Vec::new());
        let mut frame = Frame { function, info, values, arguments, locals, returned, growing: Vec::new() };
        for (handle, variable) in function.local_variables.iter() {
            let value = match variable.init {
                Some(init) => self.value(&mut frame, init),
                None => self.any(&self.module.types[variable.ty].inner),
            };
            frame.locals.insert(handle, value);
        }
        let mark = self.known.mark();
        self.block(&mut frame, &function.body);
        let mut returned = frame.returned;
        let value = returned.pop();
        let value = value.map(|last| returned.into_iter().fold(last, |a, b| self.either(a, b)));
        self.known.back(mark);
        value.unwrap_or(Value::Any)
    }

    /// Some value of a type.
    fn any(&mut self, ty: &TypeInner) -> Value {
        let (scalar, count) = match *ty {
            TypeInner::Scalar(scalar) => (scalar, 1),
            TypeInner::Vector { size, scalar } => (scalar, size as usize),
            _ => return Value::Any,
        };
        match scalar.kind {
            ScalarKind::Uint => Value::Ints((0..count).map(|_| self.known.unknown(0, MOST)).collect()),
            ScalarKind::Bool => Value::Truth(Some(Vec::new()), Some(Vec::new())),
            _ => Value::Any,
        }
    }

    /// One of two values.
    fn either(&mut self, a: Value, b: Value) -> Value {
        match (a, b) {
            (a, b) if a == b => a,
            (Value::Ints(a), Value::Ints(b)) if a.len() == b.len() => {
                let hull = |(a, b): (&Linear, &Linear)| {
                    let least = self.known.least(a).min(self.known.least(b)).max(0);
                    let most = self.known.most(a).max(self.known.most(b)).min(MOST);
                    if a == b { a.clone() } else { self.known.unknown(least, most) }
                };
                Value::Ints(a.iter().zip(&b).map(hull).collect())
            }
            (Value::Truth(yes, no), Value::Truth(other_yes, other_no)) => {
                let both = |a: Option<Facts>, b: Option<Facts>| match (a, b) {
                    (None, facts) | (facts, None) => facts,
                    (Some(a), Some(b)) => Some(a.into_iter().filter(|fact| b.contains(fact)).collect()),
                };
                Value::Truth(both(yes, other_yes), both(no, other_no))
            }
            _ => Value::Any,
        }
    }

    fn value(&mut self, frame: &mut Frame<'a>, handle: Handle<Expression>) -> Value {
        match frame.values.get(&handle) {
            Some(value) => value.clone(),
            None => self.computed(frame, handle),
        }
    }

    fn ints(&mut self, frame: &mut Frame<'a>, handle: Handle<Expression>) -> Option<Vec<Linear>> {
        match self.value(frame, handle) {
            Value::Ints(ints) => Some(ints),
            _ => None,
        }
    }

    fn computed(&mut self, frame: &mut Frame<'a>, handle: Handle<Expression>) -> Value {
        let ty = frame.info[handle].ty.inner_with(&self.module.types);
        let found = match &frame.function.expressions[handle] {
            Expression::Literal(literal) => of_literal(*literal),
            Expression::Constant(constant) => {
                match &self.module.global_expressions[self.module.constants[*constant].init] {
                    Expression::Literal(literal) => of_literal(*literal),
                    _ => None,
                }
            }
            Expression::FunctionArgument(index) => frame.arguments.get(*index as usize).cloned(),
            Expression::GlobalVariable(global) => Some(Value::Place(Root::Global(*global), None, None)),
            Expression::LocalVariable(local) => Some(Value::Place(Root::Local(*local), None, None)),
            Expression::Load { pointer } => self.load(frame, *pointer),
            Expression::Access { base, index } => self.element(frame, handle, *base, *index),
            Expression::AccessIndex { base, index } => self.member(frame, *base, *index),
            Expression::Compose { components, .. } => {
                let parts: Option<Vec<_>> = components.iter().map(|c| self.ints(frame, *c)).collect();
                parts.map(|parts| Value::Ints(parts.concat()))
            }
            Expression::Splat { size, value } => {
                self.ints(frame, *value).map(|v| Value::Ints(vec![v[0].clone(); *size as usize]))
            }
            Expression::Binary { op, left, right } => self.binary(frame, handle, *op, [*left, *right]),
            Expression::Math {
                fun: fun @ (MathFunction::Min | MathFunction::Max),
                arg,
                arg1: Some(other),
                ..
            } => {
                let (a, b) = (self.ints(frame, *arg), self.ints(frame, *other));
                let one = |(a, b): (&Linear, &Linear)| match fun {
                    MathFunction::Min => self.known.lesser(a, b),
                    _ => self.known.greater(a, b),
                };
                a.zip(b).map(|(a, b)| Value::Ints(a.iter().zip(&b).map(one).collect()))
            }
            Expression::Select { condition, accept, reject } => {
                let (a, b) = (self.value(frame, *accept), self.value(frame, *reject));
                let chosen = match self.value(frame, *condition) {
                    Value::Truth(_, None) => a,
                    Value::Truth(None, _) => b,
                    _ => self.either(a, b),
                };
                Some(chosen).filter(|value| matches!(value, Value::Ints(_)))
            }
            Expression::As { expr, kind: ScalarKind::Uint, .. } => self.ints(frame, *expr).map(Value::Ints),
            Expression::CooperativeLoad { data, .. } => {
                self.fragment(frame, handle, data);
                None
            }
            _ => None,
        };
        found.unwrap_or_else(|| self.any(ty))
    }

    fn load(&mut self, frame: &mut Frame<'a>, pointer: Handle<Expression>) -> Option<Value> {
        match self.value(frame, pointer) {
            Value::Place(Root::Local(variable), None, None) => frame.locals.get(&variable).cloned(),
            Value::Place(Root::Global(global), at, member) => {
                let variable = &self.module.global_variables[global];
                let name = variable.name.as_deref().unwrap_or_default();
                match variable.space {
                    naga::AddressSpace::Uniform => {
                        let TypeInner::Struct { members, .. } = &self.module.types[variable.ty].inner else {
                            return None;
                        };
                        let member = members[member? as usize].name.as_deref()?;
                        let value = self.sizes.params.get(member)?;
                        Some(Value::Ints(vec![Linear::of(i128::from(*value))]))
                    }
                    naga::AddressSpace::Storage { .. } => {
                        let most = i128::from(self.sizes.buffers.get(name)?.1);
                        let base =
                            frame.info[pointer].ty.inner_with(&self.module.types).pointer_base_type()?;
                        let Value::Ints(ints) = self.any(base.inner_with(&self.module.types)) else {
                            return Some(Value::Any);
                        };
                        let mut ints: Vec<_> = ints.iter().map(|_| self.known.unknown(0, most)).collect();
                        if let (Some(at), "integers") = (at, name) {
                            self.of_rows(&at, &mut ints[0]);
                        }
                        Some(Value::Ints(ints))
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Integers of a microbatch hold at 2 T + i the first token of token i's row, and at 3 T + i the end of that row.
    fn of_rows(&mut self, at: &Linear, found: &mut Linear) {
        let tokens = i128::from(self.sizes.params["tokens"]);
        let token = |part: i128| at.plus(&Linear::of(part * tokens), -1);
        if self.known.at_least(&token(3), 0) {
            self.known.always(token(3).plus(&Linear::of(1), 1).plus(found, -1));
        } else if self.known.at_least(&token(2), 0) && self.known.at_most(&token(3), -1) {
            self.known.always(found.plus(&token(2), -1));
        }
    }

    /// The number of elements of what a place holds.
    fn length(&self, root: Root, frame: &Frame) -> Option<u32> {
        let ty = match root {
            Root::Global(global) => {
                let variable = &self.module.global_variables[global];
                if matches!(variable.space, naga::AddressSpace::Storage { .. }) {
                    return self.sizes.buffers.get(variable.name.as_deref()?).map(|(length, _)| *length);
                }
                variable.ty
            }
            Root::Local(local) => frame.function.local_variables[local].ty,
        };
        length(&self.module.types[ty].inner)
    }

    fn element(
        &mut self,
        frame: &mut Frame<'a>,
        at: Handle<Expression>,
        base: Handle<Expression>,
        index: Handle<Expression>,
    ) -> Option<Value> {
        let place = self.value(frame, base);
        let length = match &place {
            Value::Place(root, None, None) => self.length(*root, frame),
            _ => {
                let ty = frame.info[base].ty.inner_with(&self.module.types);
                let inner = ty.pointer_base_type();
                length(inner.as_ref().map_or(ty, |inner| inner.inner_with(&self.module.types)))
            }
        };
        let index = self.ints(frame, index).map(|ints| ints[0].clone());
        let inside = index.as_ref().zip(length).is_some_and(|(index, length)| {
            self.known.at_most(index, i128::from(length) - 1) && self.known.at_least(index, 0)
        });
        if !inside {
            let most = index.as_ref().map(|index| self.known.most(index));
            self.doubt(frame, at, &format!("index up to {most:?} of {length:?}"));
        }
        match place {
            Value::Place(root, None, None) => Some(Value::Place(root, index, None)),
            Value::Place(root, ..) => Some(Value::Place(root, None, Some(0))),
            _ => None,
        }
    }

    /// A constant index, which naga has checked.
    fn member(&mut self, frame: &mut Frame<'a>, base: Handle<Expression>, index: u32) -> Option<Value> {
        match self.value(frame, base) {
            Value::Ints(ints) => ints.get(index as usize).map(|i| Value::Ints(vec![i.clone()])),
            Value::Place(root, at, _) => Some(Value::Place(root, at, Some(index))),
            _ => None,
        }
    }

    fn binary(
        &mut self,
        frame: &mut Frame<'a>,
        at: Handle<Expression>,
        op: Op,
        sides: [Handle<Expression>; 2],
    ) -> Option<Value> {
        let [left, right] = sides.map(|side| self.value(frame, side));
        match (left, right) {
            (Value::Ints(a), Value::Ints(b)) if a.len() == 1 && b.len() == 1 => {
                Some(self.scalars(frame, at, op, (&a[0], &b[0])))
            }
            (Value::Ints(a), Value::Ints(b)) => {
                let one = |(i, a): (usize, &Linear)| self.scalars(frame, at, op, (a, &b[i.min(b.len() - 1)]));
                let all: Vec<Value> =
                    a.iter().cycle().take(a.len().max(b.len())).enumerate().map(one).collect();
                let ints = all.into_iter().map(|value| match value {
                    Value::Ints(ints) => Some(ints[0].clone()),
                    _ => None,
                });
                ints.collect::<Option<Vec<_>>>().map(Value::Ints)
            }
            (Value::Truth(yes, no), Value::Truth(other_yes, other_no)) => {
                let both = |a: Option<Facts>, b: Option<Facts>| Some([a?, b?].concat());
                match op {
                    Op::LogicalAnd | Op::And => Some(Value::Truth(both(yes, other_yes), Some(Vec::new()))),
                    Op::LogicalOr | Op::InclusiveOr => {
                        Some(Value::Truth(Some(Vec::new()), both(no, other_no)))
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn scalars(
        &mut self,
        frame: &Frame,
        at: Handle<Expression>,
        op: Op,
        (a, b): (&Linear, &Linear),
    ) -> Value {
        let less = |a: &Linear, b: &Linear, by: i128| a.plus(b, -1).plus(&Linear::of(by), 1);
        let truth = |known: &Known, yes: Facts, no: Facts| {
            let never = |facts: &Facts| facts.iter().any(|fact| known.at_least(fact, 1));
            Value::Truth(Some(yes).filter(|f| !never(f)), Some(no).filter(|f| !never(f)))
        };
        let known = &mut self.known;
        Value::Ints(vec![match op {
            Op::Add => known.settled(a.plus(b, 1)),
            Op::Subtract => known.settled(a.plus(b, -1)),
            Op::Multiply => known.product(a, b),
            Op::Divide | Op::Modulo => match b.known() {
                Some(by) if by > 0 && op == Op::Divide => known.quotient(a, by),
                Some(by) if by > 0 => known.remainder(a, by),
                _ => {
                    self.doubt(frame, at, "a divisor that may be 0");
                    self.known.unknown(0, MOST)
                }
            },
            Op::ShiftLeft if b.known().is_some_and(|by| by < 32) => {
                known.product(a, &Linear::of(1 << b.known().unwrap_or(0)))
            }
            Op::ShiftRight if b.known().is_some_and(|by| by < 32) => {
                known.quotient(a, 1 << b.known().unwrap_or(0))
            }
            Op::And => {
                let most = known.most(a).min(known.most(b));
                let less = known.unknown(0, most);
                known.assume(&[less.plus(a, -1), less.plus(b, -1)]);
                less
            }
            Op::Less => return truth(known, vec![less(a, b, 1)], vec![less(b, a, 0)]),
            Op::LessEqual => return truth(known, vec![less(a, b, 0)], vec![less(b, a, 1)]),
            Op::Greater => return truth(known, vec![less(b, a, 1)], vec![less(a, b, 0)]),
            Op::GreaterEqual => return truth(known, vec![less(b, a, 0)], vec![less(a, b, 1)]),
            Op::Equal => {
                let no = if a == b { vec![Linear::of(1)] } else { Vec::new() };
                return truth(known, vec![less(a, b, 0), less(b, a, 0)], no);
            }
            Op::NotEqual => {
                let yes = if a == b { vec![Linear::of(1)] } else { Vec::new() };
                return truth(known, yes, vec![less(a, b, 0), less(b, a, 0)]);
            }
            _ => known.unknown(0, MOST),
        }])
    }

    /// A fragment of a matrix in an array: its first element, and a stride.
    fn fragment(&mut self, frame: &mut Frame<'a>, of: Handle<Expression>, data: &naga::CooperativeData) {
        let TypeInner::CooperativeMatrix { columns, rows, .. } =
            frame.info[of].ty.inner_with(&self.module.types)
        else {
            return self.doubt(frame, of, "a fragment of no matrix");
        };
        let (across, down) = match data.row_major {
            true => (*columns as u32, *rows as u32),
            false => (*rows as u32, *columns as u32),
        };
        let stride = self.ints(frame, data.stride).map(|ints| ints[0].clone());
        let place = self.value(frame, data.pointer);
        let (Some(stride), Value::Place(root, Some(index), None)) = (stride, place) else {
            return self.doubt(frame, of, "a fragment at no element");
        };
        let last = index.plus(&stride, i128::from(down - 1)).plus(&Linear::of(i128::from(across - 1)), 1);
        if !self.length(root, frame).is_some_and(|length| self.known.at_most(&last, i128::from(length) - 1)) {
            let most = self.known.most(&last);
            self.doubt(frame, of, &format!("a fragment up to {most}"));
        }
    }
}

fn length(ty: &TypeInner) -> Option<u32> {
    match *ty {
        TypeInner::Array { size: naga::ArraySize::Constant(length), .. } => Some(length.get()),
        TypeInner::Vector { size, .. } => Some(size as u32),
        _ => None,
    }
}

fn of_literal(literal: Literal) -> Option<Value> {
    match literal {
        Literal::U32(value) => Some(Value::Ints(vec![Linear::of(i128::from(value))])),
        Literal::Bool(true) => Some(Value::Truth(Some(Vec::new()), None)),
        Literal::Bool(false) => Some(Value::Truth(None, Some(Vec::new()))),
        _ => None,
    }
}
