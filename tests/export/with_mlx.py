"""Compares, with mlx-lm in f32, each base with its adapter and the merged model; usage: with_mlx.py CASES_JSON

A case with a `prompt` is loaded with its tokenizer, and its greedy tokens are compared with `text`.
"""
import json
import os
import sys
import traceback
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import mlx.core as mx
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_adapters, load_model

IDS = mx.array([[(i * 7919 + 11) % 2048 for i in range(12)]])


def widen(path):
    """The weights in f32: mlx-lm adds 1 to the gains of Qwen3.5 in the type of the file."""
    file = str(Path(path) / "model.safetensors")
    weights = {name: values.astype(mx.float32) for name, values in mx.load(file).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "pt"})


def logits(path, adapter=None):
    model, _ = load_model(Path(path))
    if adapter:
        model = load_adapters(model, adapter)
    model.set_dtype(mx.float32)
    model.eval()
    return model(IDS)


def check(case):
    if case["name"].startswith("Qwen3_5"):
        widen(case["base"])
    adapted, base, merged = logits(case["base"], case["adapter"]), logits(case["base"]), logits(case["merged"])
    off, effect, size = (mx.abs(x).max().item() for x in (adapted - merged, adapted - base, adapted))
    print(f"{case['name']}: off {off:.1e}, effect of the adapter {effect:.1e}, largest logit {size:.1e}", flush=True)
    assert off <= 1e-4 * size and effect > 1e-2 * size
    if "prompt" in case:
        model, tokenizer = load(case["base"], adapter_path=case["adapter"])
        model.set_dtype(mx.float32)
        text = generate(model, tokenizer, tokenizer.encode(case["prompt"]), max_tokens=12, sampler=make_sampler(0.0))
        assert text.strip() == case["text"].strip(), (text, case["text"])


failed = False
with open(sys.argv[1]) as f:
    cases = json.load(f)
for case in cases:
    try:
        check(case)
    except Exception:
        failed = True
        print(case["name"])
        traceback.print_exc()
sys.exit(1 if failed else print("done"))
