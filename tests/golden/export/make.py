#!/usr/bin/env python3
"""Makes the golden files beside it, with other implementations.
Needs: pip install gguf numpy safetensors torch transformers; a C compiler; a source tree of llama.cpp
usage: make.py LLAMA_CPP_DIR

numbers.f32      4,096 numbers: normal ones, tiny ones, large ones, all equal, zeros
quantised.gguf   these numbers in every kind: blocks of 32 by the gguf package's `quantize`, K kinds by ggml-quants.c
llama, qwen2     a PEFT adapter, its base's config.json, and the output of llama.cpp's convert_lora_to_gguf.py
demo.json        the output of llama.cpp's convert_hf_to_gguf.py for the demonstration's model in F16: metadata (long
                 arrays as length and sha256 of their JSON) and the sha256 of each tensor's bytes
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGMLQuantizationType as Q, GGUFReader, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA = os.path.abspath(sys.argv[1])


def numbers(rng):
    x = rng.standard_normal((16, 256)).astype("<f4")
    x[3] *= 1e-3
    x[4] *= 100
    x[5, :64] = 0
    x[6] = 0
    x[7] = 0.25
    x[8] = np.abs(x[8])
    x[9] = -np.abs(x[9])
    x[10, 17] = 30
    x[11] = np.round(x[11] * 2) / 2              # ties
    x[12, 32:] *= 1e-20
    x[13] = 1e-9
    x.tofile(os.path.join(HERE, "numbers.f32"))
    return x


def quantised(x):
    w = GGUFWriter(os.path.join(HERE, "quantised.gguf"), "blocks")
    for kind in [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]:
        w.add_tensor(kind.name, quantize(x, kind), raw_dtype=kind)
    src = os.path.join(LLAMA, "ggml", "src")
    with tempfile.TemporaryDirectory() as tmp:
        exe = os.path.join(tmp, "q")
        subprocess.run(["cc", "-O1", "-ffp-contract=off", "-std=gnu11", f"-I{src}", f"-I{LLAMA}/ggml/include", "-o", exe,
                        os.path.join(HERE, "quantise_k.c"), os.path.join(src, "ggml-quants.c"), "-lm",
                        "-mf16c"], check=True)
        for n, kind in [(2, Q.Q2_K), (3, Q.Q3_K), (4, Q.Q4_K), (5, Q.Q5_K), (6, Q.Q6_K)]:
            out = subprocess.run([exe, str(n)], input=x.tobytes(), stdout=subprocess.PIPE, check=True).stdout
            w.add_tensor(kind.name, np.frombuffer(out, np.uint8).reshape(16, -1), raw_dtype=kind)
    w.add_tensor(Q.MXFP4.name, quantize(x, Q.MXFP4), raw_dtype=Q.MXFP4)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()


def adapter(name, arch, rng):
    """rank 4 on q, k, v and down of two layers: hidden 32, 4 heads of 8, 2 key/value heads, 48 inside the MLP"""
    dir = os.path.join(HERE, name)
    os.makedirs(dir, exist_ok=True)
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "mlp.down_proj": (32, 48)}
    tensors = {}
    for layer in range(2):
        for module, (n, k) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{path}.lora_A.weight"] = rng.standard_normal((4, k)).astype("<f4")
            tensors[f"{path}.lora_B.weight"] = rng.standard_normal((n, 4)).astype("<f4")
    save_file(tensors, os.path.join(dir, "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": 4, "lora_alpha": 8,
              "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}
    with open(os.path.join(dir, "adapter_config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
    base = {"architectures": [arch + "ForCausalLM"], "model_type": arch.lower(), "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    with open(os.path.join(dir, "config.json"), "w") as f:
        json.dump(base, f, indent=2, sort_keys=True)
    subprocess.run([sys.executable, os.path.join(LLAMA, "convert_lora_to_gguf.py"), "--base", dir, "--outtype", "f32",
                    "--outfile", os.path.join(dir, "lora.gguf"), dir], check=True, stderr=subprocess.DEVNULL)


def fact(field):
    value = field.contents()
    if isinstance(value, list) and len(value) > 16 or isinstance(value, str) and len(value) > 200:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return {"length": len(value), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return value


def demo():
    model = os.path.join(HERE, "..", "..", "..", "demo", "model")
    # The converter identifies a tokenizer by the ids of a text, and does not know ours.
    run = ("import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/gguf-py']; import conversion.base as b; "
           "b.TextModel.get_vocab_base_pre = lambda *a: 'gpt-2'; sys.argv = ['convert'] + sys.argv[2:]; "
           "import convert_hf_to_gguf as c; c.main()")
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "demo.gguf")
        subprocess.run([sys.executable, "-c", run, LLAMA, "--outtype", "f16", "--outfile", out, model], check=True,
                       stderr=subprocess.DEVNULL)
        r = GGUFReader(out)
        facts = {k: fact(f) for k, f in r.fields.items() if not k.startswith("GGUF.")}
        # numpy shows shapes as GGUF stores them: innermost first
        tensors = {t.name: [t.tensor_type.name, [int(d) for d in t.shape], hashlib.sha256(t.data.tobytes()).hexdigest()]
                   for t in r.tensors}
    with open(os.path.join(HERE, "demo.json"), "w") as f:
        json.dump({"metadata": facts, "tensors": tensors}, f, indent=1, sort_keys=True)
        f.write("\n")


if __name__ == "__main__":
    rng = np.random.default_rng(7)
    quantised(numbers(rng))
    adapter("llama", "Llama", rng)
    adapter("qwen2", "Qwen2", rng)
    demo()
