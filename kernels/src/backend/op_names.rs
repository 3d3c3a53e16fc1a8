//! The names of the ops. Every row of the table in `ops.rs` needs one, and every name needs its cases in
//! `tests/op_cases`: the compiler refuses both.

/// Declares [`Op`]. An op has the name of its method, or the one after `as`.
macro_rules! ops {
    (@name $op:ident) => { stringify!($op) };
    (@name $op:ident $name:literal) => { $name };
    ($($op:ident $(as $name:literal)?),* $(,)?) => {
        /// The ops of backends, each under the name of its method.
        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Op {$(
            #[doc = concat!("The method `", stringify!($op), "`.")]
            $op,
        )*}

        impl Op {
            /// All ops.
            pub const ALL: &[Op] = &[$(Op::$op),*];

            /// The name in faults and in the times of [`Notes`](super::Notes).
            pub fn name(self) -> &'static str {
                match self {
                    $(Op::$op => ops!(@name $op $($name)?),)*
                }
            }
        }
    };
}

ops! {
    // Memory and integers, which the cases of all other ops use.
    memory, short, prepare, ids, tokens, weight,
    weight_of_blocks as "weight", settle, upload, read, read_all as "read",
    fill, copy, add, embed, rmsnorm, rmsnorm_grad, linear, linear_grad, matmul, bias, rope, rope_grad,
    attention, attention_grad, attention_cached, convolution, convolution_grad, convolution_silu, convolution_silu_grad,
    delta_rule, delta_rule_grad, gated, gated_grad, dropout, gather_rows, gather_rows_grad,
    scale_rows, scale_rows_grad, cross_entropy,
    lora_down, lora, lora_grad, lora_linear, lora_linear_grad, lm_head_loss, sum_rows,
    rmsnorm_for_linear as "rmsnorm", gated_for_linear as "gated", rope_for_attention as "rope",
}
