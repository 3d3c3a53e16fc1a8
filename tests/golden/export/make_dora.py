#!/usr/bin/env python3
"""Makes dora/: an adapter of DoRA on the base of tests/golden/parity/llama, and the weights that PEFT merges it to.
Needs: pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2
usage: make_dora.py
"""
import os

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
os.chdir(f"{HERE}/../../..")  # the adapter has the path of its base
torch.manual_seed(5)
model = AutoModelForCausalLM.from_pretrained("tests/golden/parity/llama/model", dtype=torch.float32)
peft = get_peft_model(model, LoraConfig(
    r=3, lora_alpha=7, use_dora=True, use_rslora=True, task_type="CAUSAL_LM",
    target_modules=["q_proj", "o_proj", "down_proj"], exclude_modules=["layers.1.self_attn.o_proj"]))
for name, w in peft.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(w, std=0.2)
    if "magnitude" in name:
        w.data *= torch.empty_like(w).uniform_(0.5, 1.5)
peft.save_pretrained(f"{HERE}/dora")
merged = peft.merge_and_unload().state_dict()
save_file({k: v.contiguous() for k, v in merged.items() if k.split(".")[-2] in ("q_proj", "o_proj", "down_proj", "k_proj")},
          f"{HERE}/dora/merged.safetensors")
os.remove(f"{HERE}/dora/README.md")
