"""Prints PEFT's eval loss of an adapter: mean over the completion tokens of prompt / completion rows.

usage: eval_adapter.py MODEL_DIR ADAPTER_DIR EVAL_JSONL
"""
import json, sys

import torch
from make_real_case import evaluate
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model_dir, adapter, rows = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter)
loaded = sum(int(w.abs().sum() > 0) for n, w in model.named_parameters() if "lora_B" in n)
if loaded == 0:
    sys.exit(f"{adapter}: every B is zero: PEFT did not find the tensors under the names that it wants")
with open(rows, encoding="utf-8") as lines:
    rows = [json.loads(line) for line in lines]
print(f"{evaluate(model, AutoTokenizer.from_pretrained(model_dir), rows):.6f}")
