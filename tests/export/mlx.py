"""Compares, with mlx-lm, each base with its adapter and the merged model; usage: mlx.py CASES_JSON"""
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import mlx.core as mx
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_sampler

IDS = mx.array([[(i * 7919 + 11) % 2048 for i in range(12)]])


def logits(path, **more):
    model, tokenizer = load(path, **more)
    model.set_dtype(mx.float32)
    return model, tokenizer, model(IDS).astype(mx.float32)


with open(sys.argv[1]) as f:
    cases = json.load(f)
for case in cases:
    model, tokenizer, adapted = logits(case["base"], adapter_path=case["adapter"])
    _, _, base = logits(case["base"])
    _, _, merged = logits(case["merged"])
    off, effect, size = (mx.abs(x).max().item() for x in (adapted - merged, adapted - base, adapted))
    print(f"{case['name']}: off {off:.1e}, effect of the adapter {effect:.1e}, largest logit {size:.1e}")
    assert off <= 1e-4 * size and effect > 1e-2 * size, case["name"]
    if "text" in case:
        text = generate(model, tokenizer, tokenizer.encode(case["prompt"]), max_tokens=12, sampler=make_sampler(0.0))
        assert text.strip() == case["text"].strip(), (text, case["text"])
print("done")
