#!/usr/bin/env python3
"""The comparisons of tests/runners.sh; each command prints one line, or fails.

same-tensors OURS THEIRS             adapters: the same tensors, bit for bit, and the same alpha
same-model OURS THEIRS               models: the same tensors, bit for bit, and the same metadata for keys of both
mix OURS F32 FILE_TYPE               a mix: the tensors and the file type that llama.cpp makes of the file in F32
readable OURS BASE                   a merged file in the base's kinds: names, kinds and shapes equal the base's
logits BASE PEFT MERGED              PEFT on the base against transformers on the merged model
                                     (a BASE that is a .gguf is dequantised by transformers and the gguf package)
tokens BASE RUN GGUF [LORA]          llama.cpp's greedy tokens against `finetune generate`
close BASE RUN MERGED GGUF [LORA]    the same up to the position where MERGED's two best logits are within 0.2
"""
import json
import os
import subprocess
import sys

import numpy as np

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWrite the git command for this task.\nList all branches<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in 1999,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
]
LENGTH = 32


def files(*paths):
    from gguf import GGUFReader
    return [GGUFReader(p) for p in paths]


def tensors(reader):
    return {t.name: t for t in reader.tensors}


def identical(ours, theirs):
    a, b = tensors(ours), tensors(theirs)
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    for name, t in a.items():
        o = b[name]
        assert t.tensor_type == o.tensor_type and list(t.shape) == list(o.shape), name
        assert t.data.tobytes() == o.data.tobytes(), f"{name} differs"
    return len(a)


def same_tensors(ours, theirs):
    a, b = files(ours, theirs)
    n = identical(a, b)
    alpha = [r.fields["adapter.lora.alpha"].contents() for r in (a, b)]
    assert alpha[0] == alpha[1], alpha
    print(f"{os.path.basename(ours)}: {n} tensors and alpha {alpha[0]:g} are the converter's")


def same_model(ours, theirs):
    a, b = files(ours, theirs)
    n = identical(a, b)
    both = [k for k in a.fields if k in b.fields and not k.startswith("GGUF.") and k != "general.name"]
    for key in both:
        assert a.fields[key].contents() == b.fields[key].contents(), key
    missing = [k for k in b.fields if k not in a.fields and k not in ("general.size_label", "general.tags")]
    print(f"{os.path.basename(ours)}: {n} tensors and {len(both)} metadata entries are the converter's; without {missing}")


def mix(ours, plain, file_type):
    import cyllama.llama.llama_cpp as llama
    llama.disable_logging()
    params = llama.LlamaModelQuantizeParams()
    params.ftype, theirs = int(file_type), ours + ".theirs"
    llama.model_quantize(plain, theirs, params)
    a, b = files(ours, theirs)
    n = identical(a, b)
    own, other = (r.fields["general.file_type"].contents() for r in (a, b))
    assert own == other, (own, other)
    os.remove(theirs)
    print(f"{os.path.basename(ours)}: {n} tensors and the file type are llama_model_quantize's")


def readable(ours, base):
    a, b = (tensors(r) for r in files(ours, base))
    assert a.keys() == b.keys()
    assert all(a[n].tensor_type == b[n].tensor_type and list(a[n].shape) == list(b[n].shape) for n in a)
    changed = sum(a[n].data.tobytes() != b[n].data.tobytes() for n in a)
    print(f"{os.path.basename(ours)}: {len(a)} tensors in the base's own kinds, {changed} of them changed")


def ids_of(tokenizer, prompt):
    return tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids


def logits(base, adapter, merged):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(merged)
    def load(path):
        where, file = (os.path.dirname(path), os.path.basename(path)) if path.endswith(".gguf") else (path, None)
        return AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32).eval()
    one, two, worst = PeftModel.from_pretrained(load(base), adapter).eval(), load(merged), 0.0
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = ids_of(tokenizer, prompt)
            worst = max(worst, (one(ids).logits - two(ids).logits).abs().max().item())
    assert worst < 1e-2, worst
    print(f"PEFT on {os.path.basename(base)}, transformers on the merged model: logits within {worst:.1e}")


def ours(base, run):
    out = []
    for prompt in PROMPTS:
        line = subprocess.run([os.environ["FINETUNE"], "generate", base, "--adapter", run, "--dtype", "f32", "--prompt", prompt,
                               "--max-new-tokens", str(LENGTH), "--json"], check=True, stdout=subprocess.PIPE).stdout
        out.append(json.loads(line))
    return out


def theirs(gguf, lora):
    """Greedy ids, up to what ends a text."""
    from llama_cpp import Llama, llama_vocab_is_eog
    m = Llama(gguf, lora_path=lora, n_ctx=256, n_threads=os.cpu_count(), verbose=False)
    out = []
    for prompt in PROMPTS:
        ids = m.tokenize(prompt.encode(), add_bos=False, special=True)
        m.reset()
        m.eval(ids)
        made = []
        while len(made) < LENGTH:
            best = int(np.argmax(np.ctypeslib.as_array(m._ctx.get_logits_ith(-1), shape=(m.n_vocab(),))))
            if llama_vocab_is_eog(m._model.vocab, best):
                break
            made.append(best)
            m.eval([best])
        out.append((ids, made, m.detokenize(made, special=False).decode("utf-8", "replace")))
    return out


def tokens(base, run, gguf, lora=None):
    n = 0
    for mine, (_, made, text) in zip(ours(base, run), theirs(gguf, lora)):
        assert mine["text"] == text and mine["tokens"] == len(made), (mine, text, len(made))
        n += len(made)
    beside = f" + {os.path.basename(lora)}" if lora else ""
    print(f"llama.cpp on {os.path.basename(gguf)}{beside}: the tokens of `finetune generate`, {n} on {len(PROMPTS)} prompts")


def close(base, run, merged, gguf, lora=None):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    equal, stops = 0, []
    for mine, (ids, made, _) in zip(ours(base, run), theirs(gguf, lora)):
        with torch.no_grad():
            best = torch.topk(model(torch.tensor([ids + made])).logits[0, len(ids) - 1:-1], 2)
        near = [at for at, (a, b) in enumerate(best.values.tolist()) if a - b < 0.2]
        end = near[0] if near else len(made)
        assert best.indices[:end, 0].tolist() == made[:end], f"{mine['prompt']!r}: differs though nothing is near"
        same = tokenizer.decode(made[:end], skip_special_tokens=True)
        assert mine["text"].startswith(same), (mine["text"], same)
        equal += end
        stops.append(end)
    print(f"llama.cpp on {os.path.basename(gguf)}: {equal} tokens equal, every prompt up to a near tie (at {stops})")


if __name__ == "__main__":
    {"same-tensors": same_tensors, "same-model": same_model, "mix": mix, "readable": readable, "logits": logits, "tokens": tokens,
     "close": close}[sys.argv[1]](*sys.argv[2:])
