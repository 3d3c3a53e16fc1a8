//! Statements that order others: barriers, fences, waits and what they wait for. The builder marks each of them, and
//! tests remove the marked statements one by one.

use crate::statement::{Parts, parts};
use std::ops::Range;

/// The way in which a statement orders others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Threads of a block or of a warp wait for each other.
    Barrier,
    /// Writes before it are visible after it.
    Fence,
    /// Initializes an mbarrier with its number of arrivals.
    Begin,
    /// An mbarrier expects a number of bytes.
    Expect,
    /// A thread arrives at an mbarrier.
    Arrive,
    /// The branch back to the test whether an mbarrier's phase is complete.
    Wait,
    /// Starts the copy engine.
    Copy,
    /// Commits what was started since the last commit as a group.
    Commit,
    /// Waits until at most a number of groups are pending.
    Pending,
    /// Frees registers.
    Give,
}

/// A statement that orders others, with its place in the text of its file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    /// Its entry.
    pub entry: String,
    /// Its effect.
    pub order: Order,
    /// The statement with its `;`.
    pub at: Range<usize>,
    /// Its last operand, if that is a count.
    pub number: Option<Range<usize>>,
    /// The label that a wait branches back to, if it is one.
    pub label: String,
}

/// The order of a statement, if it has one; `before` is the previous statement.
pub fn order(text: &str, before: &str) -> Option<Order> {
    let Parts { guard, opcode, .. } = parts(text);
    let begins = |beginning: &str| opcode.starts_with(beginning);
    let asked = || parts(before).opcode.starts_with("mbarrier.try_wait");
    Some(match () {
        () if begins("bar.") => Order::Barrier,
        () if begins("fence.") || begins("wgmma.fence") => Order::Fence,
        () if begins("mbarrier.init") => Order::Begin,
        () if begins("mbarrier.arrive.expect_tx") => Order::Expect,
        () if begins("mbarrier.arrive") => Order::Arrive,
        () if opcode == "bra" && guard.is_some() && asked() => Order::Wait,
        () if begins("cp.async.bulk") => Order::Copy,
        () if opcode.contains("commit_group") => Order::Commit,
        () if opcode.contains("wait_group") => Order::Pending,
        () if begins("setmaxnreg.dec") => Order::Give,
        () => return None,
    })
}

impl Mark {
    /// The mark of a statement that begins at `at`; `text` is without `;`.
    pub fn new(entry: &str, text: &str, (before, at): (&str, usize)) -> Option<Mark> {
        let order = order(text, before)?;
        let last = parts(text).operands.last().copied().unwrap_or("");
        let end = at + text.len();
        let counts = matches!(order, Order::Begin | Order::Expect | Order::Pending);
        let number = counts.then(|| end - last.len()..end);
        let label = if order == Order::Wait { last.to_string() } else { String::new() };
        Some(Mark { entry: entry.into(), order, at: at..end + 1, number, label })
    }

    /// The file's text without the statement, and with other counts.
    pub fn faults(&self, text: &str) -> Vec<String> {
        let with =
            |range: &Range<usize>, to: &str| format!("{}{to}{}", &text[..range.start], &text[range.end..]);
        let mut all = vec![with(&self.at, "")];
        let number =
            self.number.as_ref().and_then(|range| Some((range, text[range.clone()].parse::<usize>().ok()?)));
        if let Some((range, count)) = number {
            let others = match self.order {
                Order::Begin if count > 1 => vec![count - 1, count + 1],
                Order::Expect => vec![count + 16],
                _ => vec![count + 1],
            };
            all.extend(others.iter().map(|n| with(range, &n.to_string())));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use crate::Text;

    #[test]
    fn fault_takes_a_statement_away_or_changes_its_count() {
        let mut t = Text::default();
        t.entry("kernel", &[], 32);
        t.code(".reg .u32 %bar; .reg .pred %p; mov.u32 %bar, 0; mbarrier.init.shared::cta.b64 [%bar+8], 2");
        t.label("FULL");
        t.code("mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0; @!%p bra FULL; @%p bra FULL");
        t.code("cp.async.wait_group 1; bar.sync 0");
        t.end();
        let file = t.finish("kernel.ptx");
        let mut found = String::new();
        for mark in &file.marks {
            assert_eq!(mark.entry, "kernel");
            for fault in mark.faults(&file.text) {
                let differs = |(old, new): &(&str, &str)| old.trim() != new.trim();
                let line = file.text.lines().zip(fault.lines()).find(differs);
                let (old, new) = line.map_or(("", ""), |(old, new)| (old.trim(), new.trim()));
                found += &format!("{old} -> `{new}`\n");
            }
        }
        let expected = "\
mbarrier.init.shared::cta.b64 [%bar+8], 2; -> ``
mbarrier.init.shared::cta.b64 [%bar+8], 2; -> `mbarrier.init.shared::cta.b64 [%bar+8], 1;`
mbarrier.init.shared::cta.b64 [%bar+8], 2; -> `mbarrier.init.shared::cta.b64 [%bar+8], 3;`
@!%p bra FULL; -> ``
cp.async.wait_group 1; -> ``
cp.async.wait_group 1; -> `cp.async.wait_group 2;`
bar.sync 0; -> ``
";
        assert_eq!(found, expected);
    }
}
