//! The loss of a regression on the outputs of a head.

use super::stage::LossSums;

/// The derivatives of the sum of squared errors in each output, and the sums. As in transformers, the divisor counts
/// each number of a row.
pub fn squared_errors(numbers: &[f32], outputs: &[f32]) -> (Vec<f32>, LossSums) {
    let mut loss = 0.0;
    let slope = |(output, number): (&f32, &f32)| {
        let error = f64::from(*output) - f64::from(*number);
        loss += error * error;
        (2.0 * error) as f32
    };
    let slopes = outputs.iter().zip(numbers).map(slope).collect();
    let (weight, targets) = (numbers.len() as f64, numbers.len() as u64);
    let rows = outputs.iter().map(|output| f64::from(*output)).collect();
    (slopes, LossSums { loss, weight, targets, rows, ..LossSums::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_twice_the_errors() {
        let (slopes, sums) = squared_errors(&[1.0, -2.0], &[1.5, 0.0]);
        assert_eq!(slopes, [1.0, 4.0]);
        assert_eq!((sums.loss, sums.weight, sums.targets, sums.rows), (4.25, 2.0, 2, vec![1.5, 0.0]));
    }
}
