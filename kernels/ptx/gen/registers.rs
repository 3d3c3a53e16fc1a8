//! Registers of an entry with their types, as `.reg` declares them.

use std::collections::HashMap;

/// The kind of a register's value, as far as instructions distinguish it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    /// Any kind.
    Bits,
    Integer,
    Float,
    Predicate,
}

/// The type of a register, or the type of an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Type {
    class: Class,
    pub bits: u32,
}

impl Type {
    /// From PTX's name: `u32`, `f32`, `pred`; two numbers in a word are 32 bits.
    pub fn named(name: &str) -> Option<Type> {
        let of = |class, bits| Some(Type { class, bits });
        match name {
            "pred" => return of(Class::Predicate, 1),
            "bf16x2" => return of(Class::Bits, 32),
            "bf16" => return of(Class::Bits, 16),
            "f16" => return of(Class::Float, 16),
            _ => {}
        }
        let bits = name.get(1..)?.parse().ok()?;
        match name.as_bytes()[0] {
            b'b' => of(Class::Bits, bits),
            b'u' | b's' => of(Class::Integer, bits),
            b'f' => of(Class::Float, bits),
            _ => None,
        }
    }

    /// The type of twice the width.
    pub fn wide(self) -> Type {
        Type { bits: 2 * self.bits, ..self }
    }

    /// Whether an instruction of type `self` accepts a register of that type: bits match any kind.
    pub fn takes(self, register: Type) -> bool {
        let free = |t: Type| t.class == Class::Bits;
        self.bits == register.bits
            && (self.class == register.class
                || (free(self) && register.class != Class::Predicate)
                || free(register))
    }
}

/// The registers of one entry, in the order of their declarations.
#[derive(Default)]
pub struct Registers {
    all: Vec<(String, Type)>,
    places: HashMap<String, usize>,
}

/// Types and names of a list in the notation of `.reg`, without that word: `.u32 %x, %y<2>; .pred %p`.
pub fn listed(list: &str) -> Vec<(String, Type)> {
    let mut all = Vec::new();
    for part in list.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let (kind, names) = part.split_once(' ').unwrap_or((part, ""));
        let kind = kind.strip_prefix('.').and_then(Type::named);
        let kind = kind.unwrap_or_else(|| panic!("{part}: no type of registers"));
        for name in names.split(',').map(str::trim) {
            match name.strip_suffix('>').and_then(|n| n.split_once('<')) {
                Some((stem, count)) => {
                    let count = count.parse().unwrap_or_else(|_| panic!("{part}: how many {stem}?"));
                    all.extend((0..count).map(|i: usize| (format!("{stem}{i}"), kind)));
                }
                None => all.push((name.to_string(), kind)),
            }
        }
    }
    all
}

/// Names of `count` registers from `from` on, as a list: `%a4, %a5`.
pub fn numbered(stem: &str, from: usize, count: usize) -> String {
    let names: Vec<String> = (from..from + count).map(|i| format!("{stem}{i}")).collect();
    names.join(", ")
}

impl Registers {
    /// Adds the registers of a declaration; each name once.
    pub fn declare(&mut self, list: &str) {
        for (name, kind) in listed(list) {
            let twice = self.places.insert(name.clone(), self.all.len());
            assert!(twice.is_none(), "{name} is declared twice");
            self.all.push((name, kind));
        }
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The index of a register, by its name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.places.get(name).copied()
    }

    pub fn name(&self, place: usize) -> &str {
        &self.all[place].0
    }

    pub fn kind(&self, place: usize) -> Type {
        self.all[place].1
    }

    /// Indices of the registers of a list; each must be declared, with that type.
    pub fn places(&self, list: &str, whose: &str) -> Vec<usize> {
        let place = |(name, kind): (String, Type)| {
            let at = self.find(&name).unwrap_or_else(|| panic!("{whose} uses {name}, which is not declared"));
            assert!(kind.takes(self.kind(at)), "{whose} uses {name} as another type than it has");
            at
        };
        listed(list).into_iter().map(place).collect()
    }
}
