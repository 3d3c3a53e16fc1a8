//! The classes of a classifier. If the classes are known, any other label is an error with its line. Otherwise, with
//! --num-classes, integer labels are class indices; without it the classes are the labels in the data: integers in
//! ascending order, or names in byte order.

use crate::data::Options;
use crate::data::error::{DataError, Place};
use crate::data::form::Label;
use crate::data::samples::Samples;
use serde_json::Value;
use std::collections::HashMap;

/// The class names of a classifier, by index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelMap {
    /// Names of the classes, as in the rows.
    pub names: Vec<String>,
}

impl LabelMap {
    /// The index of a class name.
    pub fn index(&self, name: &str) -> Option<u32> {
        self.names.iter().position(|n| n == name).map(|i| i as u32)
    }

    /// The class of a label: by name, or by index. If any class name is an integer, an integer label is only a name:
    /// label `0` with classes 1, 2, 3 is an error, not the first class.
    pub fn class(&self, label: &Label) -> Option<u32> {
        let by_name = self.index(&label.to_string());
        by_name.or_else(|| match label {
            Label::Int(_) if self.names.iter().any(|n| n.trim().parse::<i64>().is_ok()) => None,
            Label::Int(i) => u32::try_from(*i).ok().filter(|&i| (i as usize) < self.names.len()),
            Label::Name(_) => None,
        })
    }

    /// The classes as id2label of config.json: `{"0": "safe", "1": "unsafe"}`.
    pub fn id2label(&self) -> Value {
        Value::Object(
            self.names.iter().enumerate().map(|(i, n)| (i.to_string(), n.as_str().into())).collect(),
        )
    }
}

/// The classes during reading.
pub(crate) struct Labels {
    num_classes: Option<usize>,
    known: Option<LabelMap>,
    /// Labels in order of first appearance, if no classes are known in advance.
    seen: HashMap<Label, u32>,
    names: bool,
}

impl Labels {
    pub(crate) fn new(options: &Options) -> Labels {
        let known = options.labels.clone();
        Labels { num_classes: options.num_classes, known, seen: HashMap::new(), names: false }
    }

    /// The preliminary index of a label; [`Labels::settle`] makes it final.
    pub(crate) fn class(&mut self, label: Label, place: &Place) -> Result<u32, DataError> {
        let outside = |label: &Label, allowed: String| DataError::Label {
            place: place.clone(),
            label: label.to_string(),
            allowed,
        };
        if let Some(known) = &self.known {
            return known
                .class(&label)
                .ok_or_else(|| outside(&label, format!("the classes {}", known.names.join(", "))));
        }
        self.names |= matches!(label, Label::Name(_));
        if let (Some(n), Label::Int(i)) = (self.num_classes, &label)
            && !(0..n as i64).contains(i)
        {
            return Err(outside(&label, format!("0 .. {} (--num-classes {n})", n.saturating_sub(1))));
        }
        let next = self.seen.len() as u32;
        if let Some(n) = self.num_classes
            && next as usize >= n
            && !self.seen.contains_key(&label)
        {
            return Err(outside(&label, format!("the {n} classes seen before it (--num-classes {n})")));
        }
        Ok(*self.seen.entry(label).or_insert(next))
    }

    /// The final classes; updates the labels of all rows.
    pub(crate) fn settle(self, samples: &mut Samples) -> LabelMap {
        if let Some(known) = self.known {
            return known;
        }
        let mut labels: Vec<(Label, u32)> = self.seen.into_iter().collect();
        // A mix of integers and names counts as names.
        if self.names {
            labels.sort_by_key(|(l, _)| l.to_string());
        } else {
            labels.sort();
        }
        let mut names: Vec<String> = labels.iter().map(|(l, _)| l.to_string()).collect();
        let mut to = vec![0; labels.len()];
        for (index, (label, from)) in labels.iter().enumerate() {
            to[*from as usize] = match (label, self.num_classes) {
                (Label::Int(i), Some(_)) if !self.names => *i as u32,
                _ => index as u32,
            };
        }
        if let Some(n) = self.num_classes {
            if self.names {
                names.extend((names.len()..n).map(|i| format!("LABEL_{i}")));
            } else {
                names = (0..n).map(|i| i.to_string()).collect();
            }
        }
        samples.relabel(|l| to[l as usize]);
        LabelMap { names }
    }
}
