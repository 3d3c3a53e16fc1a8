//! Data flow: a statement that reads a register which a part of the kernel left as scratch, or which no statement
//! wrote, is an error of the generator. All paths are followed, including loops.

use crate::registers::Registers;
use crate::statement::Statement;
use std::collections::HashMap;

/// The elements of a body, in order.
pub enum Item {
    Label(String),
    Run(Statement),
    /// The end of a part: its scratch registers have no value from here on.
    Left {
        part: String,
        scratch: Vec<usize>,
    },
}

/// The state of a register: no value on any path, a value, or the last part that used it as scratch on at least one
/// path (counted from 2). Where paths join, the largest state counts.
type Value = u32;
const NOTHING: Value = 0;
const HOLDS: Value = 1;

/// The first statement that reads a register without a value, if any.
pub fn fault(items: &[Item], registers: &Registers) -> Option<String> {
    let mut labels = HashMap::new();
    for (at, item) in items.iter().enumerate() {
        if let Item::Label(name) = item
            && labels.insert(name.as_str(), at).is_some()
        {
            return Some(format!("the label {name} stands twice"));
        }
    }
    let mut before: Vec<Option<Vec<Value>>> = vec![None; items.len() + 1];
    let mut open = vec![(0, vec![NOTHING; registers.len()])];
    while let Some((mut at, mut values)) = open.pop() {
        while joins(&mut before[at], &mut values)
            && let Some(item) = items.get(at)
        {
            at += 1;
            let Item::Run(s) = item else {
                if let Item::Left { scratch, .. } = item {
                    scratch.iter().for_each(|&r| values[r] = at as Value + 1);
                }
                continue;
            };
            s.writes.iter().for_each(|&r| values[r] = HOLDS);
            if let Some(label) = &s.jumps {
                let Some(&to) = labels.get(label.as_str()) else {
                    return Some(format!("there is no label {label}"));
                };
                open.push((to, values.clone()));
            }
            if !s.guarded && (s.ends || s.jumps.is_some()) {
                break;
            }
        }
    }
    items.iter().zip(&before).find_map(|(item, values)| match (item, values) {
        (Item::Run(s), Some(values)) => read(s, values, (items, registers)),
        _ => None,
    })
}

/// Joins the state of another path; false if that changes nothing.
fn joins(known: &mut Option<Vec<Value>>, values: &mut [Value]) -> bool {
    let Some(known) = known else {
        *known = Some(values.to_vec());
        return true;
    };
    let mut changed = false;
    for (k, v) in known.iter_mut().zip(values.iter_mut()) {
        (changed, *k) = (changed || *v > *k, (*v).max(*k));
        *v = *k;
    }
    changed
}

fn read(s: &Statement, values: &[Value], (items, registers): (&[Item], &Registers)) -> Option<String> {
    let added = s.adds.iter().filter(|r| values[**r] != NOTHING);
    let bad = *s.reads.iter().chain(added).find(|r| values[**r] != HOLDS)?;
    let part = (values[bad] as usize).checked_sub(2).and_then(|at| items.get(at));
    let why = match part {
        Some(Item::Left { part, .. }) => format!("`{part}` clobbers"),
        _ => "nothing has written".into(),
    };
    Some(format!("`{}` reads {}, which {why}", s.text, registers.name(bad)))
}
