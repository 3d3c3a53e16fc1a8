"""The peer of benches/decode.sh: greedy `generate` of transformers with its KV cache, as one JSON line: seconds by the
clock and of the processor of a short and of a long answer, after a warm-up.

usage: transformers_decode.py MODEL_DIR PROMPT TOKENS THREADS f32|bf16       needs: pip install torch transformers
"""
import json, sys, time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model_dir, prompt, tokens, threads, dtype = sys.argv[1:]
tokens, threads = int(tokens), int(threads)
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
ids = AutoTokenizer.from_pretrained(model_dir)(prompt, return_tensors="pt")


def answer(n):
    began, cpu = time.perf_counter(), time.process_time()
    out = model.generate(**ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True)
    assert out.shape[1] == ids["input_ids"].shape[1] + n, "the answer ended early"
    return time.perf_counter() - began, time.process_time() - cpu


answer(4)
print(json.dumps({"who": "transformers", "dtype": dtype, "threads": threads, "tokens": tokens, "short": answer(4),
                  "long": answer(tokens + 4)}))
