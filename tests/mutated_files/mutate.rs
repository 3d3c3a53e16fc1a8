//! Structured damage: bytes, JSON, lines of text. Every choice is a draw from one seeded stream.

use finetune::numeric::rng::Stream;
use serde_json::Value;

/// Numbers at the limits of types, and slightly above small sizes.
pub const EDGES: [u64; 18] = [
    0,
    1,
    2,
    7,
    255,
    256,
    65_535,
    65_536,
    (1 << 31) - 1,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    (1 << 53) + 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

/// JSON values of unexpected types.
const STRANGE: [&str; 34] = [
    "0",
    "-1",
    "1",
    "3",
    "1e308",
    "-1e308",
    "1e999",
    "NaN",
    "-0.0",
    "0.5",
    "1e-320",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "9223372036854775807",
    "4294967296",
    "2147483648",
    "65536",
    "1000000000000",
    "true",
    "false",
    "null",
    "\"\"",
    "\"x\"",
    "[]",
    "{}",
    "[[]]",
    "{\"\":0}",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\\u202e\\u001b[2J\\n\"",
    "\"../../x\"",
    "[0,-1,1e9]",
    "\"99999999999\"",
];

/// Text with a special meaning for some reader.
const WORDS: [&str; 24] = [
    "\0",
    "\n",
    "\r",
    "\t",
    "\u{1b}[2J",
    "\u{202e}",
    "\u{feff}",
    "\u{fffd}",
    "🦀",
    "\u{301}",
    "\"",
    "'",
    "\\",
    "{",
    "}",
    "[",
    ",",
    ":",
    "<|im_end|>",
    "../",
    "-",
    "%",
    "e9",
    "99999999999999999999",
];

/// A seeded source of choices.
pub struct Dice(Stream);

impl Dice {
    pub fn new(key: &[u64]) -> Self {
        Dice(Stream::new(key))
    }

    /// A number in 0..n; 0 if n is 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.0.below((n as u32).max(1)) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    pub fn word(&mut self, list: &[&'static str]) -> &'static str {
        list[self.below(list.len())]
    }

    /// A number at a limit, a small one, or any.
    pub fn number(&mut self) -> u64 {
        match self.below(4) {
            0 => u64::from(self.0.bits()) << 32 | u64::from(self.0.bits()),
            1 => self.below(300) as u64,
            _ => *self.pick(&EDGES),
        }
    }

    pub fn byte(&mut self) -> u8 {
        self.0.bits() as u8
    }
}

/// Damages bytes in one to four places.
pub fn bytes(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..1 + dice.below(4) {
        let len = bytes.len();
        let at = dice.below(len);
        let part = (1 + dice.below(16)).min(len - at.min(len));
        match dice.below(9) {
            0 => bytes.truncate(at),
            1 if len > 0 => bytes[at] ^= 1 << dice.below(8),
            2 if len > 0 => bytes[at] = dice.byte(),
            3 => drop(bytes.drain(at..at + part)),
            4 => bytes.splice(at..at, (0..part).map(|_| dice.byte()).collect::<Vec<_>>()).for_each(drop),
            5 => bytes.extend_from_within(at..at + part),
            6 => number(dice, bytes, at),
            7 => bytes.splice(at..at, bytes[at..at + part].to_vec()).for_each(drop),
            _ => {
                let from = dice.below(len);
                let part = part.min(len - from.max(at).min(len));
                bytes.copy_within(from..from + part, at);
            }
        }
    }
}

/// Overwrites the bytes at `at` with an integer of 1, 2, 4 or 8 bytes.
pub fn number(dice: &mut Dice, bytes: &mut [u8], at: usize) {
    let width = (1 << dice.below(4)).min(bytes.len() - at.min(bytes.len()));
    let value = dice.number().to_le_bytes();
    bytes[at..at + width].copy_from_slice(&value[..width]);
}

/// Damages text in one place; it stays text.
pub fn text(dice: &mut Dice, text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = dice.below(chars.len() + 1);
    let (head, tail): (String, String) = (chars[..at].iter().collect(), chars[at..].iter().collect());
    match dice.below(6) {
        0 => head,
        1 => format!("{text}{text}"),
        2 => format!("{head}{}", tail.chars().skip(1 + dice.below(8)).collect::<String>()),
        3 => format!("{head}{}{tail}", dice.word(&WORDS).repeat(1 + dice.below(3))),
        4 => format!("{head}{}{tail}", dice.number()),
        _ => tail.to_uppercase(),
    }
}

/// Damages lines: their order, number, indentation, or the text of one.
pub fn lines(dice: &mut Dice, whole: &str) -> String {
    let mut lines: Vec<String> = whole.lines().map(String::from).collect();
    for _ in 0..1 + dice.below(3) {
        let (at, other) = (dice.below(lines.len()), dice.below(lines.len()));
        if lines.is_empty() {
            break;
        }
        match dice.below(7) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(other, lines[at].clone()),
            2 => lines.swap(at, other),
            3 => lines[at].insert_str(0, dice.word(&[" ", "  ", "\t", "- ", "      "])),
            _ => lines[at] = text(dice, &lines[at]),
        }
    }
    lines.join(dice.word(&["\n", "\n", "\n", "\r\n", "\r"])) + "\n"
}

/// Damages a JSON document in one to three nodes, and rarely its text.
pub fn json(dice: &mut Dice, whole: &Value) -> Vec<u8> {
    let mut value = whole.clone();
    let mut raws = Vec::new();
    for _ in 0..1 + dice.below(3) {
        let node = descend(dice, &mut value);
        change(dice, node, &mut raws);
    }
    let mut text = value.to_string();
    for (i, raw) in raws.iter().enumerate() {
        text = text.replace(&format!("\"@raw{i}@\""), raw);
    }
    // A key with this mark becomes a duplicate of another key.
    let mut out = text.replace("\"@again@", "\"").into_bytes();
    if dice.one_in(8) {
        bytes(dice, &mut out);
    }
    out
}

/// A random node: one in four stops at each level, so that shallow and deep nodes are both frequent.
fn descend<'a>(dice: &mut Dice, value: &'a mut Value) -> &'a mut Value {
    let children = match value {
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    if children == 0 || dice.one_in(4) {
        return value;
    }
    let at = dice.below(children);
    match value {
        Value::Array(list) => descend(dice, &mut list[at]),
        Value::Object(map) => descend(dice, map.values_mut().nth(at).unwrap()),
        _ => value,
    }
}

fn change(dice: &mut Dice, node: &mut Value, raws: &mut Vec<String>) {
    match node {
        Value::Object(map) if !map.is_empty() && !dice.one_in(4) => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let (key, other) = (dice.pick(&keys).clone(), dice.pick(&keys).clone());
            match dice.below(5) {
                0 => drop(map.shift_remove(&key)),
                1 => drop(map.insert(format!("@again@{key}"), map[&other].clone())),
                2 => {
                    let value = map.shift_remove(&key).unwrap();
                    map.insert(text(dice, &key), value);
                }
                3 => {
                    let (a, b) = (map[&key].clone(), map[&other].clone());
                    map.insert(key, b);
                    map.insert(other, a);
                }
                _ => drop(map.insert(text(dice, &key), map[&other].clone())),
            }
        }
        Value::Array(list) if !list.is_empty() && !dice.one_in(4) => {
            let (at, other) = (dice.below(list.len()), dice.below(list.len()));
            match dice.below(5) {
                0 => drop(list.remove(at)),
                1 => list.push(list[at].clone()),
                2 => list.swap(at, other),
                3 => list.clear(),
                _ => list.extend(vec![list[at].clone(); 100]),
            }
        }
        Value::String(s) if !dice.one_in(3) => *s = text(dice, s),
        Value::Number(_) if dice.one_in(2) => *node = Value::from(dice.number()),
        _ => *node = strange(dice, raws),
    }
}

/// A placeholder for raw text until the document is written.
fn strange(dice: &mut Dice, raws: &mut Vec<String>) -> Value {
    let deep = 1 << dice.below(14);
    raws.push(match dice.below(24) {
        0 => "[".repeat(deep),
        1 => "[".repeat(deep) + &"]".repeat(deep),
        2 => "{\"a\":".repeat(deep) + "1" + &"}".repeat(deep),
        3 => format!("\"{}\"", "long ".repeat(deep)),
        4 => "9".repeat(deep),
        _ => dice.word(&STRANGE).to_string(),
    });
    Value::from(format!("@raw{}@", raws.len() - 1))
}
