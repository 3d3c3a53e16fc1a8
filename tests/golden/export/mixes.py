#!/usr/bin/env python3
"""Makes mixes.json: the types that llama.cpp chooses for each tensor, and the bytes that it makes of them.
Needs: pip install gguf numpy safetensors cyllama==0.2.18 (llama.cpp b9190 as a library, with its `llama_model_quantize`)
usage: mixes.py FINETUNE_BINARY

shapes    models of zeros: for each mix the most frequent type, and the types of the other tensors in the order of layers
          (`Q6_K*2 Q4_K`); null if llama.cpp refuses the mix
models    the demonstration's model, whose rows are no multiples of 256, and a wider one with values of a formula, both
          exported in F32: for each mix the types as above, and the sha256 of all tensors in the order of their names
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

import cyllama.llama.llama_cpp as llama
import numpy as np
from gguf import GGUFReader, GGUFWriter
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
MIXES = {"q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_0": 2, "q4_1": 3, "q4_k_s": 14, "q4_k_m": 15,
         "q5_0": 8, "q5_1": 9, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "q8_0": 7}
# architecture, layers, (query heads, key/value heads), experts, has output.weight, hidden size, inner size of the MLP
SHAPES = {
    "four queries for a key": ("llama", 22, (4, 1), 0, True, 256, 512),
    "tied": ("qwen3", 9, (4, 2), 0, False, 256, 256),
    "seventy": ("llama", 80, (4, 2), 0, True, 256, 256),
    "eighty layers, a head each": ("llama", 80, (4, 4), 0, True, 256, 256),
    "seventy of Qwen 2": ("qwen2", 80, (4, 4), 0, True, 256, 256),
    "eight experts": ("qwen3moe", 17, (4, 1), 8, True, 256, 256),
    "sixteen experts": ("qwen3moe", 34, (4, 2), 16, True, 256, 256),
    "one of all tokens": ("qwen2moe", 12, (4, 2), 5, True, 256, 256),
    "fused": ("phi3", 12, (4, 4), 0, True, 256, 512),
    "rows of 32": ("llama", 16, (4, 2), 0, True, 96, 256),
    "rows of 32, tied": ("qwen3", 3, (4, 2), 0, False, 96, 32),
    "rows of 8": ("llama", 3, (4, 4), 0, True, 256, 40),
}


def write(path, arch, layers, heads, experts, head, hidden, inner):
    w = GGUFWriter(path, arch)
    size = hidden // heads[0]
    for name, value in [("block_count", layers), ("context_length", 64), ("embedding_length", hidden),
                        ("feed_forward_length", inner), ("attention.head_count", heads[0]),
                        ("attention.head_count_kv", heads[1]), ("attention.key_length", size),
                        ("attention.value_length", size), ("rope.dimension_count", size)]:
        w.add_uint32(f"{arch}.{name}", value)
    w.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    if experts:
        w.add_uint32(f"{arch}.expert_count", experts)
        w.add_uint32(f"{arch}.expert_used_count", 2)
        w.add_uint32(f"{arch}.expert_feed_forward_length", inner)
    if arch == "qwen2moe":
        w.add_uint32(f"{arch}.expert_shared_feed_forward_length", inner)
    if arch == "phi3":
        w.add_uint32("phi3.attention.sliding_window", 0)
    tensors = {"token_embd": (64, hidden), "output_norm": (hidden,)}
    if head:
        tensors["output"] = (64, hidden)
    q, kv = heads[0] * size, heads[1] * size
    attention = {"attn_qkv": (q + 2 * kv, hidden)} if arch == "phi3" else {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    mlp = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    if arch == "phi3":
        mlp = {"ffn_up": (2 * inner, hidden), "ffn_down": mlp["ffn_down"]}
    if experts:
        shared = {f"{name}_shexp": shape for name, shape in mlp.items()} | {"ffn_gate_inp_shexp": (hidden,)}
        mlp = {f"{name}_exps": (experts, *shape) for name, shape in mlp.items()} | {"ffn_gate_inp": (experts, hidden)}
        mlp |= shared if arch == "qwen2moe" else {}
    for i in range(layers):
        for name, shape in (attention | {"attn_output": (hidden, q), "attn_norm": (hidden,)} | mlp).items():
            tensors[f"blk.{i}.{name}"] = shape
    for name, shape in tensors.items():
        w.add_tensor(name + ".weight", np.zeros(shape, "<f4"))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()


def drawn(tensor, shape):
    """Values of tensor number `tensor`, as `drawn` in tests/export/mixes.rs."""
    h = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(tensor * 40503)
    h = (h ^ (h >> 15)) * np.uint32(2246822519)
    h ^= h >> 13
    return ((h >> 8).astype("<f4") / np.float32(1 << 24) - np.float32(0.5)).reshape(shape)


def wide(path):
    """A model with rows of 256 and 512."""
    shutil.copytree(os.path.join(HERE, "..", "..", "..", "demo", "model"), path)
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    config |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 1,
               "tie_word_embeddings": False}
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f)
    shapes = {"model.embed_tokens": (2048, 256), "model.norm": (256,), "lm_head": (2048, 256)}
    for i in range(4):
        for name, shape in {
                "input_layernorm": (256,), "post_attention_layernorm": (256,), "self_attn.q_proj": (256, 256),
                "self_attn.k_proj": (64, 256), "self_attn.v_proj": (64, 256), "self_attn.o_proj": (256, 256),
                "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}.items():
            shapes[f"model.layers.{i}.{name}"] = shape
    tensors = {f"{name}.weight": drawn(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})


def quantise(source, number):
    """The tensors of llama.cpp's file by name, or None if it refuses. The next call replaces the file below them."""
    out = source + ".quantised"
    params = llama.LlamaModelQuantizeParams()
    params.ftype, params.nthread = number, 2
    try:
        llama.model_quantize(source, out, params)
    except RuntimeError:
        return None
    reader = GGUFReader(out)
    assert reader.fields["general.file_type"].contents() == number
    return {t.name: t for t in reader.tensors}


def layer(name):
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def types(tensors):
    """(the most frequent type of matrices, the types of others by the middle of their names)"""
    matrices = {n: t for n, t in tensors.items() if t.tensor_type.name != "F32"}
    usual = Counter(t.tensor_type.name for t in matrices.values()).most_common(1)[0][0]
    parts = {}
    for name in sorted(matrices, key=layer):
        parts.setdefault(name.removesuffix(".weight").split(".")[-1], []).append(matrices[name].tensor_type.name)
    others = {}
    for part, each in sorted(parts.items()):
        runs = []
        for kind in each:
            if runs and runs[-1][0] == kind:
                runs[-1][1] += 1
            else:
                runs.append([kind, 1])
        if runs != [[usual, len(each)]]:
            others[part] = " ".join(kind if n == 1 else f"{kind}*{n}" for kind, n in runs)
    return {"usual": usual, **others}


def digest(tensors):
    all = hashlib.sha256()
    for name in sorted(tensors):
        all.update(np.ascontiguousarray(tensors[name].data).tobytes())
    return all.hexdigest()


def main(finetune):
    llama.disable_logging()
    keys = ["architecture", "layers", "heads", "experts", "head", "hidden", "inner"]
    facts = {"shapes": {}, "models": {}}
    with tempfile.TemporaryDirectory() as tmp:
        for name, shape in SHAPES.items():
            path = os.path.join(tmp, "shape.gguf")
            write(path, *shape)
            each = {mix: quantise(path, number) for mix, number in MIXES.items()}
            facts["shapes"][name] = dict(zip(keys, shape)) | {
                "mixes": {mix: tensors and types(tensors) for mix, tensors in each.items()}}
        base, rows, out, path = (os.path.join(tmp, n) for n in ["wide", "rows.jsonl", "out", "m.gguf"])
        wide(base)
        with open(rows, "w") as f:
            f.write('{"prompt": "a", "completion": "b"}\n')
        for model, source in [("demo", "demo"), ("wide", base)]:
            # The rate is 0, so that the adapter changes nothing.
            train = [source, "--data", rows, "--max-steps", "1", "--learning-rate", "0", "--overwrite", "-q", "-o", out]
            export = ["export", out, "--to", "merged-gguf", "--outtype", "f32", "--overwrite", "-o", path]
            for command in [train, export]:
                subprocess.run([finetune, *command], check=True, stdout=subprocess.DEVNULL)
            facts["models"][model] = {}
            for mix, number in MIXES.items():
                tensors = quantise(path, number)
                facts["models"][model][mix] = types(tensors) | {"sha256": digest(tensors)}
    with open(os.path.join(HERE, "mixes.json"), "w") as f:
        json.dump(facts, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
