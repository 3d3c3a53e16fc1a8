"""Tokens a second of llama.cpp's greedy decoding, without the prompt: what benches/decode.sh compares with.

usage: llama_decode.py MODEL.gguf PROMPT TOKENS THREADS DTYPE       needs: pip install llama-cpp-python
"""
import json, sys, time
from llama_cpp import Llama

# The dtype is that of the other side: llama.cpp chooses its own.
path, prompt, tokens, threads, dtype = sys.argv[1:]
tokens, threads = int(tokens), int(threads)
model = Llama(path, n_threads=threads, n_threads_batch=threads, n_ctx=1024, verbose=False)
ids = model.tokenize(prompt.encode(), add_bos=False)
began = None
for n, _ in enumerate(model.generate(ids, temp=0.0, top_k=1)):
    if began is None:
        began, cpu = time.time(), time.process_time()
    if n == tokens:
        break
print(json.dumps(dict(who='llama.cpp', dtype=dtype, threads=threads, tokens_per_second=n / (time.time() - began), cpu_ms=1e3 * (time.process_time() - cpu) / n)))
