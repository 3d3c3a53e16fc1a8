"""The peer of benches/decode.sh: llama.cpp's greedy decoding, as one JSON line: seconds by the clock and of the
processor. Times start at the first token, so the short answer to be subtracted takes none.

usage: llama_decode.py MODEL.gguf PROMPT TOKENS THREADS DTYPE       needs: pip install llama-cpp-python
"""
import json, sys, time
from llama_cpp import Llama

# The dtype argument belongs to the other peer: llama.cpp chooses its own.
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
took = time.time() - began, time.process_time() - cpu
assert n == tokens, "the answer ended early"
print(json.dumps(dict(who="llama.cpp", dtype=dtype, threads=threads, tokens=tokens, short=(0, 0), long=took)))
