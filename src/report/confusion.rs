//! A confusion matrix as a table of text.

use crate::numeric::say::inline;

/// What class `i` is called; its number where it has no name.
pub fn name(labels: &[String], i: usize) -> String {
    labels.get(i).cloned().unwrap_or_else(|| i.to_string())
}

/// Its lines; a class without a name is shown as its number.
pub fn lines(labels: &[String], confusion: &[Vec<u64>]) -> Vec<String> {
    let names: Vec<String> = (0..confusion.len()).map(|i| inline(&name(labels, i))).collect();
    let counts = confusion.iter().flatten().map(|n| n.to_string().len());
    let width = names.iter().map(|name| name.chars().count()).chain(counts).max().unwrap_or(0).max(6);
    let cells = |cells: Vec<String>| -> String { cells.iter().map(|c| format!(" {c:>width$}")).collect() };
    let mut lines = vec!["confusion matrix (rows: true label, columns: predicted)".to_string()];
    lines.push(format!("{:width$}{}", "", cells(names.clone())));
    for (name, row) in names.iter().zip(confusion) {
        lines.push(format!("{name:width$}{}", cells(row.iter().map(u64::to_string).collect())));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confusion_matrix_is_printed_as_a_table() {
        let labels = ["safe".to_string(), "dangerous".to_string()];
        let want = [
            "confusion matrix (rows: true label, columns: predicted)",
            "               safe dangerous",
            "safe             29         1",
            "dangerous         4        26",
        ];
        assert_eq!(lines(&labels, &[vec![29, 1], vec![4, 26]]), want);
        assert!(lines(&[], &[vec![1]])[2].starts_with("0 "), "a class without a name is a number");
        assert_eq!(lines(&["a\x1b[2J, b".into()], &[vec![1]])[2], "a\\u{1b}[2J, b             1");
    }
}
