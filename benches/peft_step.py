#!/usr/bin/env python3
"""The peer of benches/step.rs: transformers + PEFT on the same shape, one JSON line.

--mode f32, bf16 (weights), autocast (f32 weights under bf16 autocast), bf16-autocast (both); --compile for
torch.compile. cpu_s is the median processor time of a step over all threads: compare it instead of the clock on a
shared machine. pip: torch, transformers, peft (measured with 2.15, 5.23, 0.21). Weights are random: only times are compared.
"""
import argparse, json, resource, sys, time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

p = argparse.ArgumentParser()
p.add_argument("--threads", type=int, default=2)
p.add_argument("--steps", type=int, default=5)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=256)
p.add_argument("--mode", default="f32", choices=["f32", "bf16", "autocast", "bf16-autocast"])
p.add_argument("--compile", action="store_true")
p.add_argument("--warm", type=int, default=2)
p.add_argument("--experts", type=int, default=0, help="a Qwen3-MoE with that many experts, 8 for each token, and adapters on attention")
p.add_argument("--model", default="llama", choices=["llama", "gemma3-270m"])
p.add_argument("--hidden", type=int, default=576)
p.add_argument("--feed-forward", type=int, default=1536)
p.add_argument("--layers", type=int, default=30)
a = p.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)
heads = max(a.hidden // 64, 1)
shared = next(kv for kv in range(max(heads // 3, 1), 0, -1) if heads % kv == 0)
sizes = dict(
    vocab_size=49152, hidden_size=a.hidden, intermediate_size=a.feed_forward, num_hidden_layers=a.layers,
    num_attention_heads=heads, num_key_value_heads=shared, head_dim=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True, max_position_embeddings=8192, attn_implementation="sdpa",
)
if a.model == "gemma3-270m":
    config = Gemma3TextConfig(vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
                              num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
                              max_position_embeddings=32768, attn_implementation="sdpa")
elif a.experts:
    config = Qwen3MoeConfig(**sizes, num_experts=a.experts, num_experts_per_tok=8, moe_intermediate_size=a.feed_forward, norm_topk_prob=True)
else:
    config = LlamaConfig(**sizes)
model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if a.mode.startswith("bf16") else torch.float32)
targets = ["q_proj", "k_proj", "v_proj", "o_proj"] + ([] if a.experts else ["gate_proj", "up_proj", "down_proj"])
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
if a.mode.startswith("bf16"):  # as PEFT does it: adapters stay in f32 on a bf16 base
    for q in model.parameters():
        if q.requires_grad:
            q.data = q.data.float()
if a.compile:
    model = torch.compile(model)
optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=2e-4)
ids = torch.randint(0, config.vocab_size, (a.batch, a.seq))
times, spent = [], []
for step in range(a.steps + a.warm):
    started, cpu = time.time(), time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in a.mode):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.time() - started
    print(f"step {step}: loss {float(loss):.4f}, {seconds:.3f} s", file=sys.stderr, flush=True)
    if step >= a.warm:
        times.append(seconds)
        spent.append(time.process_time() - cpu)
times.sort(), spent.sort()
median = times[len(times) // 2]
print(json.dumps({
    "trainer": "transformers+peft", "mode": a.mode + (" compiled" if a.compile else ""), "threads": a.threads, "rows": a.batch, "tokens": a.seq,
    "median_s": median, "best_s": times[0], "cpu_s": spent[len(spent) // 2], "tok_s": a.batch * a.seq / median,
    "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
