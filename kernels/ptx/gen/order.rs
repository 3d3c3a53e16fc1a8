//! Statements that order others: barriers, fences, waits and what they wait for. The builder leaves a mark at each, from which
//! tests take them away one by one.

use crate::statement::{Parts, parts};
use std::ops::Range;

/// How a statement orders others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Threads of a block or of a warp wait for each other.
    Barrier,
    /// What was written before is seen after it.
    Fence,
    /// An mbarrier begins; the number is that of its arrivals.
    Begin,
    /// An mbarrier expects so many bytes.
    Expect,
    /// A thread arrives at an mbarrier.
    Arrive,
    /// The branch back to a question whether an mbarrier's phase is over.
    Wait,
    /// The copy engine is started.
    Copy,
    /// What was started since the last becomes a group.
    Commit,
    /// Until at most so many groups are under way.
    Pending,
    /// Registers are given back.
    Give,
}

/// A statement that orders others, where it stands in the text of its file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The entry that it is in.
    pub entry: String,
    /// What it does.
    pub order: Order,
    /// The statement with its `;`.
    pub at: Range<usize>,
    /// Its last operand, where that is a count.
    pub number: Option<Range<usize>>,
    /// The label that a wait goes back to, else nothing.
    pub label: String,
}

/// What a statement orders, if anything; `before` is the one before it.
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

    /// The file's text with the statement taken away, and with other counts.
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
