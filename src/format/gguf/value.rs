//! Metadata values. Integers are wide enough for every type of the format; long arrays are flat, because vocabularies
//! have hundreds of thousands of entries.

/// A value of GGUF metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer type.
    Int(i128),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array of strings.
    Texts(Vec<String>),
    /// An array of f32.
    Floats(Vec<f32>),
    /// An array of u32 or i32.
    Ints(Vec<i64>),
    /// Any other array, as its bytes in the file. No supported key uses one, and an array of bytes would need thirty
    /// times the memory as values.
    Others {
        /// The format's number of the element type.
        kind: u32,
        /// The bytes of the elements.
        packed: Vec<u8>,
    },
}

impl Value {
    /// The value if it is a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Int(i) => u64::try_from(*i).ok(),
            _ => None,
        }
    }

    /// The value if it is a number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Value::Float(f) => Some(*f),
            Value::Int(i) => Some(*i as f64),
            _ => None,
        }
    }

    /// The values if it is an array of booleans.
    pub fn as_bools(&self) -> Option<Vec<bool>> {
        match self {
            Value::Others { kind: 7, packed } => Some(packed.iter().map(|b| *b != 0).collect()),
            _ => None,
        }
    }

    /// The value if it is a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// The value if it is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Text(s) => Some(s),
            _ => None,
        }
    }

    /// The value if it is an array of strings.
    pub fn as_texts(&self) -> Option<&[String]> {
        match self {
            Value::Texts(all) => Some(all),
            _ => None,
        }
    }

    /// The value if it is an array of f32.
    pub fn as_floats(&self) -> Option<&[f32]> {
        match self {
            Value::Floats(all) => Some(all),
            _ => None,
        }
    }

    /// The value if it is an array of u32 or i32.
    pub fn as_ints(&self) -> Option<&[i64]> {
        match self {
            Value::Ints(all) => Some(all),
            _ => None,
        }
    }
}
