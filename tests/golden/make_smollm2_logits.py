"""Writes the results of transformers in f32 for five texts: ids, mean negative log-likelihood, five largest last logits,
16 greedy tokens.

usage: make_smollm2_logits.py MODEL_DIR OUT.json     (transformers 5.23.0, torch 2.15.0)
smollm2-135m.json: SmolLM2-135M-Instruct in bf16. smollm2-135m-gguf-f32.json: its Q4_1 .gguf widened to an f32 directory.
"""
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ['The capital of France is', "It's 2024, hello  world!\n\tx = 12345", 'naïve café – 日本語 🙂',
         'def fibonacci(n):\n    return',
         '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n'
         '<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n']
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation='eager').eval()
cases = []
with torch.no_grad():
    for text in TEXTS:
        ids = tokenizer(text).input_ids; x = torch.tensor([ids]); logits = model(input_ids=x).logits[0]
        nll = torch.nn.functional.cross_entropy(logits[:-1], x[0, 1:])
        top = torch.topk(logits[-1], 5)
        new = []
        for _ in range(16): new.append(int(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
        cases.append(dict(text=text, ids=ids, mean_nll=float(nll), last_logits_top5=[[int(i), float(v)] for v, i in zip(*top)],
                          greedy16=new, greedy_text=tokenizer.decode(new)))
with open(sys.argv[2], 'w') as f: json.dump(cases, f, indent=1); f.write('\n')
