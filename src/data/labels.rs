//! A classifier's classes. Known classes bind: a label outside them is an error with its line. Otherwise
//! integers are classes as they stand under --num-classes, and without it the classes are what the data
//! holds: integers ascending, else names in order of their bytes.

use crate::data::Options;
use crate::data::error::{DataError, Place};
use crate::data::form::Label;
use crate::data::samples::Samples;
use serde_json::Value;
use std::collections::HashMap;

/// The names of a classifier's classes, by index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelMap {
    /// Class i's name, as it stands in the rows.
    pub names: Vec<String>,
}

impl LabelMap {
    /// The index of a name.
    pub fn index(&self, name: &str) -> Option<u32> {
        self.names.iter().position(|n| n == name).map(|i| i as u32)
    }

    /// The class that a row's label means: its name, or its index. Where a class is itself named by an
    /// integer, an integer is only ever a name: `0` among the classes 1, 2, 3 is a mistake, not the first.
    pub fn class(&self, label: &Label) -> Option<u32> {
        let by_name = self.index(&label.to_string());
        by_name.or_else(|| match label {
            Label::Int(_) if self.names.iter().any(|n| n.trim().parse::<i64>().is_ok()) => None,
            Label::Int(i) => u32::try_from(*i).ok().filter(|&i| (i as usize) < self.names.len()),
            Label::Name(_) => None,
        })
    }

    /// `{"0": "safe", "1": "unsafe"}`: config.json's id2label.
    pub fn id2label(&self) -> Value {
        Value::Object(
            self.names.iter().enumerate().map(|(i, n)| (i.to_string(), n.as_str().into())).collect(),
        )
    }
}

/// The classes while rows are read.
pub(crate) struct Labels {
    num_classes: Option<usize>,
    known: Option<LabelMap>,
    /// In order of appearance, where nothing is known; integers under --num-classes are their own index.
    seen: HashMap<Label, u32>,
    names: bool,
}

impl Labels {
    pub(crate) fn new(options: &Options) -> Labels {
        let known = options.labels.clone();
        Labels { num_classes: options.num_classes, known, seen: HashMap::new(), names: false }
    }

    /// A preliminary index; `settle` makes it final.
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

    /// The final classes, and the rows' labels moved to them.
    pub(crate) fn settle(self, samples: &mut Samples) -> LabelMap {
        if let Some(known) = self.known {
            return known;
        }
        let mut labels: Vec<(Label, u32)> = self.seen.into_iter().collect();
        // a mix of integers and names is all names
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
