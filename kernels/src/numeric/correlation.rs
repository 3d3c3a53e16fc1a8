//! Correlations of two series of numbers, with the values of scipy's `pearsonr` and `spearmanr`.

/// Pearson's correlation; `None` if one of the series is constant or shorter than 2.
pub fn pearson(pairs: &[(f64, f64)]) -> Option<f64> {
    let n = pairs.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|p| of(p.0 - x, p.1 - y)).sum::<f64>();
    let by = (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt();
    (pairs.len() > 1 && by > 0.0).then(|| (sum(&|x, y| x * y) / by).clamp(-1.0, 1.0))
}

/// Spearman's correlation: Pearson's of the ranks, where equal numbers share their mean rank.
pub fn spearman(pairs: &[(f64, f64)]) -> Option<f64> {
    let ranks = |of: fn(&(f64, f64)) -> f64| ranks(&pairs.iter().map(of).collect::<Vec<_>>());
    let both: Vec<(f64, f64)> = ranks(|p| p.0).into_iter().zip(ranks(|p| p.1)).collect();
    pearson(&both)
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    for equal in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let mean = from as f64 + (equal.len() - 1) as f64 / 2.0;
        equal.iter().for_each(|&i| ranks[i] = mean);
        from += equal.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correlations_equal_those_of_numpy() {
        // numpy 2: corrcoef of these series, and of their ranks.
        let pairs = [(1.0, 2.0), (2.0, 1.0), (2.0, 4.0), (5.0, 3.5), (-3.0, 0.0)];
        assert!((pearson(&pairs).unwrap() - PEARSON).abs() < 1e-12);
        assert!((spearman(&pairs).unwrap() - SPEARMAN).abs() < 1e-12);
        assert_eq!(
            (pearson(&[(1.0, 2.0), (1.0, 3.0)]), pearson(&[(1.0, 2.0)]), spearman(&[])),
            (None, None, None)
        );
    }

    const PEARSON: f64 = 0.767_509_327_621_645_7;
    const SPEARMAN: f64 = 0.666_885_928_855_350_1;
}
