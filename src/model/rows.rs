//! Rows of a matrix in the files that make up one projection of a block.

use crate::numeric::block::Blocks;
use std::borrow::Cow;
use std::ops::Range;

/// Rows of a matrix, in the order of a projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// Rows that follow each other.
    Range(Range<usize>),
    /// The row at each place.
    Each(Vec<usize>),
}

impl Rows {
    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Rows::Range(range) => range.len(),
            Rows::Each(rows) => rows.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stretches of rows as (first row here, first row in the matrix, number).
    pub fn stretches(&self) -> Vec<(usize, usize, usize)> {
        match self {
            Rows::Range(range) => vec![(0, range.start, range.len())],
            Rows::Each(rows) => rows.iter().enumerate().map(|(here, there)| (here, *there, 1)).collect(),
        }
    }

    /// These rows of a matrix whose rows have `size` bytes.
    pub fn of<'a>(&self, bytes: &'a [u8], size: usize) -> Cow<'a, [u8]> {
        match self {
            Rows::Range(range) => Cow::Borrowed(&bytes[range.start * size..range.end * size]),
            Rows::Each(rows) => {
                let mut all = Vec::with_capacity(rows.len() * size);
                rows.iter().for_each(|row| all.extend_from_slice(&bytes[row * size..(row + 1) * size]));
                Cow::Owned(all)
            }
        }
    }

    /// These rows of a matrix whose rows are those of `parts`, one part after the other. Rows that follow each other in one
    /// part share its bytes; all others are copied. `None` if the parts do not have the rows.
    pub fn in_blocks(&self, parts: &[Blocks]) -> Option<Blocks> {
        if let Rows::Range(range) = self
            && let Some((part, first)) = place(parts, range.start)
            && first + range.len() <= part.rows
        {
            return Some(part.range(first..first + range.len()));
        }
        let &Blocks { cols, block, .. } = parts.first()?;
        let mut bytes = Vec::with_capacity(self.len() * block.size_of(cols));
        for (_, first, count) in self.stretches() {
            for row in first..first + count {
                let (part, row) = place(parts, row)?;
                bytes.extend_from_slice(part.row(row));
            }
        }
        Blocks::new((self.len(), cols), block, bytes.into())
    }
}

/// The part that has row `row` of all parts, and the number of the row in it.
fn place(parts: &[Blocks], mut row: usize) -> Option<(&Blocks, usize)> {
    for part in parts {
        match row.checked_sub(part.rows) {
            None => return Some((part, row)),
            Some(rest) => row = rest,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::block::Block;

    #[test]
    fn rows_of_one_part_share_its_bytes() {
        let size = Block::Q8_0.bytes();
        let part = |rows: usize, of: u8| {
            let bytes: Vec<u8> = (0..(rows * size) as u8).map(|i| i ^ of).collect();
            Blocks::new((rows, 32), Block::Q8_0, bytes.into()).unwrap()
        };
        let parts = [part(3, 0), part(2, 0x5a)];
        let whole = Blocks::joined(parts.to_vec()).unwrap();
        assert_eq!((whole.rows, whole.cols), (5, 32));
        let ranges = (0..5).flat_map(|first| (first + 1..6).map(move |end| Rows::Range(first..end)));
        for rows in ranges.chain([Rows::Each(vec![4, 0, 3, 2]), Rows::Each(vec![1])]) {
            let (of_parts, of_whole) =
                (rows.in_blocks(&parts).unwrap(), rows.in_blocks(std::slice::from_ref(&whole)).unwrap());
            assert!(of_parts.bytes == of_whole.bytes && of_parts.rows == rows.len(), "{rows:?}");
            assert!(*of_parts.bytes == *rows.of(&whole.bytes, size), "{rows:?}");
            let shared =
                parts.iter().any(|part| part.bytes.as_ptr_range().contains(&of_parts.bytes.as_ptr()));
            let in_one = matches!(&rows, Rows::Range(range) if range.end <= 3 || range.start >= 3);
            assert_eq!(shared, in_one, "{rows:?}");
        }
        for missing in [Rows::Range(4..6), Rows::Range(5..6), Rows::Each(vec![5])] {
            assert!(missing.in_blocks(&parts).is_none(), "{missing:?}");
        }
    }
}
