"""Generation by `finetune serve` and by llama.cpp in turn, A B A B, in one run: tokens a second of one text, of eight texts
at once, and of a prompt of 512 tokens. llama.cpp gets fixed tokens and samples nothing, so its times are those of decoding alone.

usage: benches/generation.py MODEL.gguf       needs: pip install cyllama==0.2.18 (llama.cpp b9190 as a library)
  FINETUNE a binary (target/release/finetune)   THREADS of both (2)   PAIRS (3)   TOKENS of each text (64)   DTYPE (f32)
"""
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

import cyllama.llama.llama_cpp as llama

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
MODEL = os.path.realpath(sys.argv[1])
BINARY = os.environ.get("FINETUNE", "target/release/finetune")
THREADS, PAIRS, TOKENS = (int(os.environ.get(name, n)) for name, n in (("THREADS", 2), ("PAIRS", 3), ("TOKENS", 64)))
DTYPE, PORT, PROMPT, TEXTS = os.environ.get("DTYPE", "f32"), 8077, 512, 8


def ids(seed, count):
    """Tokens without a meaning."""
    return [1000 + (i * 7919 + seed * 104729) % 30000 for i in range(count)]


# Their greedy continuations are long.
BEGINS = ("Once upon a time there was a small", "The history of the city of Rome began", "In the middle of the forest lived a",
          "A long letter from my grandmother: Dear", "The most important inventions of the last century are",
          "Chapter one. It was a cold morning when", "How to build a house, step by step:", "The animals of the sea are many, for example")


class LlamaCpp:
    def __init__(self):
        llama.ggml_backend_load_all()
        llama.disable_logging()
        self.model = llama.LlamaModel(MODEL, llama.LlamaModelParams())
        params = llama.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = TEXTS * (PROMPT + TOKENS), PROMPT, PROMPT, TEXTS
        params.n_threads = params.n_threads_batch = THREADS
        self.context = llama.LlamaContext(self.model, params)

    def decode(self, tokens):
        batch = llama.LlamaBatch(n_tokens=PROMPT, embd=0, n_seq_max=TEXTS)
        for token, at, text, wanted in tokens:
            batch.add(token, at, [text], wanted)
        self.context.decode(batch)
        self.context.synchronize()

    def texts(self, count):
        """Tokens a second of `count` texts, after prompts of 16 tokens."""
        self.context.kv_cache_clear()
        self.decode([(t, i, n, i == 15) for n in range(count) for i, t in enumerate(ids(n, 16))])
        began = time.time()
        for at in range(16, 16 + TOKENS):
            self.decode([(ids(n, 1)[0] + at, at, n, True) for n in range(count)])
        return count * TOKENS / (time.time() - began)

    def prompt(self, seed):
        self.context.kv_cache_clear()
        began = time.time()
        self.decode([(t, i, 0, i == PROMPT - 1) for i, t in enumerate(ids(seed, PROMPT))])
        return PROMPT / (time.time() - began)


class Finetune:
    def __init__(self):
        args = [BINARY, "serve", MODEL, "--gpus", "cpu", "--threads", str(THREADS), "--dtype", DTYPE, "--bind", f"127.0.0.1:{PORT}"]
        self.server = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models") as answer:
                    self.model = json.load(answer)["data"][0]["id"]
                    return
            except OSError:
                time.sleep(0.1)
        self.server.kill()
        sys.exit("finetune serve does not answer")

    def ask(self, prompt, tokens):
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    def seconds(self, count, tokens):
        """Seconds of `count` requests at once, and the tokens that they got."""
        got = [0] * count

        def one(n):
            got[n] = self.ask(BEGINS[n], tokens)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
        began = time.time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.time() - began, sum(got)

    def texts(self, count):
        (short, few), (long, many) = self.seconds(count, 4), self.seconds(count, 4 + TOKENS)
        if many - few < 0.9 * count * TOKENS:
            sys.exit(f"texts ended early: {many} tokens")
        return (many - few) / (long - short)

    def prompt(self, seed):
        took = []
        for count in (1, PROMPT + 1):
            began = time.time()
            self.ask(ids(seed, count), 1)
            took.append(time.time() - began)
        return PROMPT / (took[1] - took[0])


# Before the server is started: a model that llama.cpp cannot load leaves no process.
llama_cpp = LlamaCpp()
peers = {"finetune": Finetune(), "llama.cpp": llama_cpp}
kinds = {"one text": lambda p, i: p.texts(1), "eight texts": lambda p, i: p.texts(TEXTS), "prompt": lambda p, i: p.prompt(i)}
try:
    for kind, measure in kinds.items():
        pairs = []
        for i in range(PAIRS + 1):
            pair = {}
            for name, peer in peers.items():
                pair[name] = measure(peer, i)
            # The first pair warms up.
            if i > 0:
                pairs.append(pair)
        middle = {name: statistics.median(pair[name] for pair in pairs) for name in peers}
        each = ", ".join(f"{pair['finetune'] / pair['llama.cpp']:.2f}" for pair in pairs)
        print(f"{kind}: {middle['finetune']:.1f} and {middle['llama.cpp']:.1f} tokens/s; ratios of the pairs {each}", flush=True)
finally:
    peers["finetune"].server.terminate()
