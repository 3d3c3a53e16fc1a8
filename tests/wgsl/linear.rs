//! Whole numbers that a kernel computes, as sums of unknowns: what is known of an unknown is its range, and inequalities
//! with others. Enough to prove that an index is inside its array.

use std::collections::{BTreeMap, HashMap};

/// An unknown number.
type Atom = usize;

/// The largest u32.
pub const MOST: i128 = u32::MAX as i128;

/// A sum of multiples of unknowns and of a constant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Linear {
    terms: BTreeMap<Atom, i128>,
    constant: i128,
}

impl Linear {
    pub fn of(constant: i128) -> Self {
        Linear { terms: BTreeMap::new(), constant }
    }

    /// The number, if it is known.
    pub fn known(&self) -> Option<i128> {
        self.terms.is_empty().then_some(self.constant)
    }

    pub fn plus(&self, other: &Linear, times: i128) -> Self {
        let mut sum = self.clone();
        sum.constant += times * other.constant;
        for (atom, by) in &other.terms {
            let entry = sum.terms.entry(*atom).or_insert(0);
            *entry += times * by;
        }
        sum.terms.retain(|_, by| *by != 0);
        sum
    }

    pub fn times(&self, by: i128) -> Self {
        Linear::of(0).plus(self, by)
    }

    /// If it is at most 0, this is too, and closer to 0: its unknowns are whole numbers.
    fn tight(&self) -> Self {
        let by = self.terms.values().fold(0, |a, b| gcd(a, b.abs()));
        if by < 2 {
            return self.clone();
        }
        let terms = self.terms.iter().map(|(atom, of)| (*atom, of / by)).collect();
        Linear { terms, constant: -(-self.constant).div_euclid(by) }
    }

    /// Whether it grows with `atom` and has no other unknown from `first` on.
    pub fn bounds(&self, atom: Atom, first: Atom) -> bool {
        self.terms.get(&atom).is_some_and(|by| *by > 0)
            && self.terms.keys().all(|other| other == &atom || *other < first)
    }
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// How a number was computed from others, so that the same computation gives the same number.
type Computed = (&'static str, Linear, Linear);

/// What is known.
#[derive(Debug, Default)]
pub struct Known {
    /// Least and largest value of each unknown.
    ranges: Vec<(i128, i128)>,
    /// What is at most 0, always: by the unknowns in it.
    always: HashMap<Atom, Vec<Linear>>,
    /// What is at most 0 here.
    here: Vec<Linear>,
    computed: HashMap<Computed, Linear>,
    order: Vec<Computed>,
    /// Ranges as they were before an assumption about one unknown.
    before: Vec<(Atom, (i128, i128))>,
}

/// A place to which what is known returns.
#[derive(Debug, Clone, Copy)]
pub struct Mark(usize, usize, usize);

impl Known {
    pub fn mark(&self) -> Mark {
        Mark(self.here.len(), self.order.len(), self.before.len())
    }

    /// Forgets what holds only after the mark.
    pub fn back(&mut self, mark: Mark) {
        self.here.truncate(mark.0);
        for (atom, range) in self.before.drain(mark.2..).rev() {
            self.ranges[atom] = range;
        }
        for key in self.order.drain(mark.1..) {
            self.computed.remove(&key);
        }
    }

    /// From here on, until what is known returns to a mark, these are at most 0.
    pub fn assume(&mut self, facts: &[Linear]) {
        for fact in facts.iter().map(Linear::tight) {
            if let (Some((&atom, &by)), 1) = (fact.terms.iter().next(), fact.terms.len()) {
                let (least, most) = self.ranges[atom];
                self.before.push((atom, (least, most)));
                let bound = -fact.constant * by;
                self.ranges[atom] = if by > 0 { (least, most.min(bound)) } else { (least.max(bound), most) };
            }
            self.here.push(fact);
        }
    }

    /// What was assumed after a mark, and holds.
    pub fn since(&self, mark: Mark) -> &[Linear] {
        &self.here[mark.0..]
    }

    /// The next unknown's number.
    pub fn next(&self) -> Atom {
        self.ranges.len()
    }

    /// A new unknown.
    pub fn unknown(&mut self, least: i128, most: i128) -> Linear {
        self.ranges.push((least, most));
        Linear { terms: BTreeMap::from([(self.ranges.len() - 1, 1)]), constant: 0 }
    }

    /// A sum that is at most 0, everywhere.
    pub fn always(&mut self, fact: Linear) {
        for atom in fact.terms.keys() {
            self.always.entry(*atom).or_default().push(fact.clone());
        }
    }

    /// The largest value by the ranges alone.
    fn widest(&self, sum: &Linear) -> i128 {
        let of = |(atom, by): (&Atom, &i128)| {
            let (least, most) = self.ranges[*atom];
            by * if *by > 0 { most } else { least }
        };
        sum.constant + sum.terms.iter().map(of).sum::<i128>()
    }

    /// Sums that are at least `sum`, by one inequality.
    fn replaced(&self, sum: &Linear) -> Vec<Linear> {
        let mut all = Vec::new();
        for (atom, by) in &sum.terms {
            for fact in self.always.get(atom).into_iter().flatten().chain(&self.here) {
                let Some(of) = fact.terms.get(atom) else { continue };
                if by.signum() == of.signum() && by % of == 0 {
                    all.push(sum.plus(fact, -(by / of)));
                }
            }
        }
        all
    }

    /// An upper bound.
    pub fn most(&self, sum: &Linear) -> i128 {
        self.replaced(sum).iter().map(|s| self.widest(s)).fold(self.widest(sum), i128::min)
    }

    /// A lower bound.
    pub fn least(&self, sum: &Linear) -> i128 {
        -self.most(&sum.times(-1))
    }

    /// Whether the sum is surely at most `bound`.
    pub fn at_most(&self, sum: &Linear, bound: i128) -> bool {
        self.shown(sum, bound, 3)
    }

    fn shown(&self, sum: &Linear, bound: i128, depth: usize) -> bool {
        if self.widest(sum) <= bound {
            return true;
        }
        depth > 0 && self.replaced(sum).iter().any(|s| self.shown(s, bound, depth - 1))
    }

    /// Whether the sum is surely at least `bound`.
    pub fn at_least(&self, sum: &Linear, bound: i128) -> bool {
        self.at_most(&sum.times(-1), -bound)
    }

    /// The same number computed once; `new` gives the range of an unknown for it, and what it is at most or at least.
    fn once(
        &mut self,
        key: Computed,
        (least, most): (i128, i128),
        facts: impl Fn(&Linear) -> Vec<Linear>,
    ) -> Linear {
        if let Some(found) = self.computed.get(&key) {
            return found.clone();
        }
        let new = self.unknown(least.max(0), most.min(MOST));
        facts(&new).into_iter().for_each(|fact| self.always(fact));
        self.computed.insert(key.clone(), new.clone());
        self.order.push(key);
        new
    }

    /// The u32 of an exact result: the same if it is one, else any.
    pub fn settled(&mut self, sum: Linear) -> Linear {
        if self.at_least(&sum, 0) && self.at_most(&sum, MOST) { sum } else { self.unknown(0, MOST) }
    }

    pub fn product(&mut self, a: &Linear, b: &Linear) -> Linear {
        match (a.known(), b.known()) {
            (Some(by), _) => self.settled(b.times(by)),
            (_, Some(by)) => self.settled(a.times(by)),
            _ => {
                let most = self.most(a).saturating_mul(self.most(b));
                if most > MOST {
                    return self.unknown(0, MOST);
                }
                let least = self.least(a) * self.least(b);
                self.once(("product", a.clone(), b.clone()), (least, most), |_| Vec::new())
            }
        }
    }

    /// a / d for a known d, which is not 0.
    pub fn quotient(&mut self, a: &Linear, d: i128) -> Linear {
        if let Some(a) = a.known() {
            return Linear::of(a / d);
        }
        let range = (self.least(a) / d, self.most(a) / d);
        self.once(("quotient", a.clone(), Linear::of(d)), range, |q| {
            let times = q.times(d);
            vec![times.plus(a, -1), a.plus(&times, -1).plus(&Linear::of(d - 1), -1)]
        })
    }

    /// a % d for a known d.
    pub fn remainder(&mut self, a: &Linear, d: i128) -> Linear {
        if self.not_above(a, &Linear::of(d - 1)) {
            return a.clone();
        }
        if let Some(a) = a.known() {
            return Linear::of(a % d);
        }
        self.once(("remainder", a.clone(), Linear::of(d)), (0, d - 1), |r| vec![r.plus(a, -1)])
    }

    /// Whether a - b is at most 0, which is then remembered.
    fn not_above(&mut self, a: &Linear, b: &Linear) -> bool {
        let off = a.plus(b, -1);
        let so = self.at_most(&off, 0);
        if so && self.widest(&off) > 0 {
            self.assume(&[off]);
        }
        so
    }

    pub fn lesser(&mut self, a: &Linear, b: &Linear) -> Linear {
        if self.not_above(a, b) {
            return a.clone();
        }
        if self.not_above(b, a) {
            return b.clone();
        }
        let range = (self.least(a).min(self.least(b)), self.most(a).min(self.most(b)));
        self.once(("lesser", a.clone(), b.clone()), range, |m| vec![m.plus(a, -1), m.plus(b, -1)])
    }

    pub fn greater(&mut self, a: &Linear, b: &Linear) -> Linear {
        if self.not_above(b, a) {
            return a.clone();
        }
        if self.not_above(a, b) {
            return b.clone();
        }
        let range = (self.least(a).max(self.least(b)), self.most(a).max(self.most(b)));
        self.once(("greater", a.clone(), b.clone()), range, |m| vec![a.plus(m, -1), b.plus(m, -1)])
    }
}

#[test]
fn bounds_follow_from_ranges_and_inequalities() {
    let mut known = Known::default();
    let (i, n) = (known.unknown(0, 100), known.unknown(1, 10));
    known.assume(&[i.plus(&n, -1).plus(&Linear::of(1), 1)]);
    assert!(known.at_most(&i, 9) && !known.at_most(&i, 8), "i < n <= 10");
    let q = known.quotient(&i, 4);
    assert!(known.at_most(&q.times(4), 9) && !known.at_most(&q.times(4), 7), "4 (i / 4) <= i");
    let m = known.lesser(&i, &Linear::of(5));
    assert!(known.at_most(&m, 5) && known.at_least(&i.plus(&m, -1), 0), "min(i, 5) <= i");
    let j = known.unknown(0, 100);
    known.assume(&[j.times(4).plus(&Linear::of(31), -1)]);
    assert!(known.at_most(&j.times(4), 28), "4 j < 32");
    let mark = known.mark();
    known.assume(std::slice::from_ref(&i));
    assert!(known.at_most(&i, 0));
    known.back(mark);
    assert!(!known.at_most(&i, 0));
    let wrapped = known.settled(i.plus(&Linear::of(1), -1));
    assert!(known.most(&wrapped) == MOST, "0 - 1 is the largest number");
}
