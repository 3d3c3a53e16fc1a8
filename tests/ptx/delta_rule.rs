//! The gradient of a delta rule on a changed kernel.

use crate::bench::{Mat, Out, run};
use crate::device::Interpreted;
use crate::op_cases::tokens;
use finetune::backend::{Backend, Cuda, Delta, DeltaGrad, DeltaHeads, DeltaSaved, Fault};

/// Two value heads of one key head, each of two tiles.
pub fn gradients(mut device: Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault> {
    let (t, heads) = (5, DeltaHeads { values: 2, keys: 1, value_size: 40, key_size: 36 });
    let wide = [36, 36, 80, 2, 2, 80, 80, 80].into_iter().enumerate();
    let mut given: Vec<Mat> = wide.map(|(i, cols)| Mat::random(t, cols, i as u64 + 1)).collect();
    given.push(Mat::random(2, 2, 9).map(|x| -x.abs()));
    let given: Vec<&Mat> = given.iter().collect();
    let outs = [36, 36, 80, 2, 2].map(|cols| Out::Poison(t, cols));
    run("delta_rule", &mut device, (&given, &outs), |d, i, o| {
        let [dq, dk, dv, dbeta, ddecay] = o else { unreachable!() };
        let grad = DeltaGrad {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            dbeta: dbeta.view_mut(),
            ddecay: ddecay.view_mut(),
        };
        let tokens = tokens(d, &[0, 5]);
        let inputs = Delta { q: i[0], k: i[1], v: i[2], beta: i[3], decay: i[4], rates: i[8], heads };
        let saved = DeltaSaved { out: i[5], errors: i[6] };
        d.delta_rule_grad(grad, i[7], saved, inputs, &tokens);
    })
}
