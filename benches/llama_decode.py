"""Tokens a second of llama.cpp's greedy decoding, without the prompt: what benches/decode.sh compares with.

usage: llama_decode.py MODEL.gguf PROMPT TOKENS THREADS       needs: pip install llama-cpp-python
"""
import json, sys, time
from llama_cpp import Llama

path, prompt, tokens, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = Llama(path, n_threads=threads, n_threads_batch=threads, n_ctx=1024, verbose=False)
ids = model.tokenize(prompt.encode(), add_bos=False)
began = None
for n, _ in enumerate(model.generate(ids, temp=0.0, top_k=1)):
    if began is None:
        began, cpu = time.time(), time.process_time()
    if n == tokens:
        break
print(json.dumps(dict(who='llama.cpp', tokens_per_second=n / (time.time() - began), cpu_ms=1e3 * (time.process_time() - cpu) / n)))
