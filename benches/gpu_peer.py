#!/usr/bin/env python3
"""The peer of benches/first_contact.sh: PyTorch's times for the work of tests/ptx/timings.rs and step.rs, on the same card in the
same run, as JSON lines. `--device cpu --small` runs from start to end, and its numbers there are no measurement.

usage: gpu_peer.py [--only products|attention|step] [--device cuda] [--small] [--compiled]
       needs: pip install torch, and for the step transformers peft
products   linear and its input's gradient, in bf16 and f32 (no TF32)
attention  2 rows of 4096 tokens, causal, 32 heads of 128 numbers that share 8 of keys, bf16, forward and backward; the
           causal half is counted, and backward as 2.5 times that
step       forward and backward of the shapes of Qwen3-4B and of SmolLM2-135M in bf16 with LoRA of rank 16 on seven
           projections and gradient checkpointing, 4 rows of 2048 tokens; no optimizer, as in our timing; with --compiled
           through torch.compile
Numbers are random: a power-limited card runs faster on equal numbers.
"""
import argparse, json, statistics, sys, time

p = argparse.ArgumentParser()
p.add_argument("--only", choices=["products", "attention", "step"])
p.add_argument("--device", default="cuda")
p.add_argument("--small", action="store_true")
p.add_argument("--compiled", action="store_true")
a = p.parse_args()
try:
    import torch
except ImportError:
    sys.exit(print("skipped: no torch"))
if a.device == "cuda" and not torch.cuda.is_available():
    sys.exit(print("skipped: no cuda"))
cuda = a.device == "cuda"
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False

# (T, N, K) as in timings.rs
PRODUCTS = [(8192, 8192, 8192), (8192, 2560, 2560), (8192, 9728, 2560), (8192, 2560, 9728), (8192, 1024, 2560),
            (4096, 9728, 2560), (16384, 9728, 2560)]


def say(**what):
    print(json.dumps(what), flush=True)


def seconds(work, times=10):
    """The median, after two that warm up."""
    taken = []
    for turn in range(times + 2):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def uniform(*shape, dtype=torch.bfloat16, size=1.0):
    return ((2 * torch.rand(*shape, device=a.device) - 1) * size).to(dtype)


def products():
    for dtype in (torch.bfloat16, torch.float32):
        for t, n, k in [(5, 6, 7)] if a.small else PRODUCTS:
            x, dy = uniform(t, k, dtype=dtype), uniform(t, n, dtype=dtype)
            w = uniform(n, k, dtype=dtype, size=(3 / max(n, k)) ** 0.5)
            rate = lambda work: 2 * t * n * k / seconds(work) / 1e12
            say(product=[t, n, k], dtype=str(dtype)[6:], tflops=rate(lambda: torch.nn.functional.linear(x, w)),
                gradient_tflops=rate(lambda: dy @ w))


def attention():
    length, size = (9, 8) if a.small else (4096, 128)
    q, k, v = (uniform(2, heads, length, size).requires_grad_() for heads in (32, 8, 8))
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if cuda:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        whatever = attend
        def attend():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return whatever()
    out = attend()
    dout = torch.rand_like(out)
    with torch.no_grad():
        forward = seconds(attend)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    work = 2 * length**2 * 2 * 32 * size / 1e12
    say(attention=[2, length, 32, 8, size], dtype="bfloat16", tflops=work / forward, gradient_tflops=2.5 * work / backward)


def step():
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
                 num_key_value_heads=1, vocab_size=50)
    qwen3 = dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, head_dim=128,
                 num_key_value_heads=8, vocab_size=151936)
    smollm2 = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, head_dim=64,
                   num_key_value_heads=3, vocab_size=49152)
    step_of("qwen3-4b", Qwen3Config, Qwen3ForCausalLM, small if a.small else qwen3)
    step_of("smollm2-135m", LlamaConfig, LlamaForCausalLM, small if a.small else smollm2)


def step_of(name, Config, Model, shape):
    from peft import LoraConfig, get_peft_model

    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows, length = (2, 9) if a.small else (4, 2048)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(a.device):
        config = Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096, use_cache=False)
        config._attn_implementation = "sdpa"
        model = Model(config)
    torch.set_default_dtype(torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(a.device).train()
    trained = [w for w in model.parameters() if w.requires_grad]
    ids = torch.randint(0, config.vocab_size, (rows, length), device=a.device)
    called = torch.compile(model) if a.compiled else model

    def once():
        for w in trained:
            w.grad = None
        called(input_ids=ids, labels=ids).loss.backward()

    took = seconds(once, 3)
    assert all(w.grad is not None and w.grad.isfinite().all() for w in trained), "a gradient is missing or not finite"
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    say(step=name if not a.small else "small", compiled=a.compiled, rows=rows, tokens=length, seconds=took,
        tokens_per_second=rows * length / took, peak_gb=peak)


if cuda:
    say(device=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda)
for name, part in (("products", products), ("attention", attention), ("step", step)):
    if a.only in (None, name):
        part()
