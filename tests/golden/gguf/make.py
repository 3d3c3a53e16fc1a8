#!/usr/bin/env python3
"""Makes the golden GGUF files beside it. Needs: pip install gguf numpy safetensors

blocks.gguf    one tensor per storage kind, [2, 512], random blocks
blocks.f32     what the gguf package makes of them: f32, little endian, tensors in order of name
tiny.gguf      a small Llama as llama.cpp stores it (q and k permuted; F32, F16, BF16 and Q8_0)
tiny.safetensors   its weights under Hugging Face names, never permuted
"""
import os
import numpy as np
from gguf import GGMLQuantizationType as Q, GGUFWriter, GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]
# where the f16 scales lie in a block
SCALES = {Q.Q8_0: [0], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q2_K: [80, 82], Q.Q3_K: [108],
          Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208]}


def blocks(rng):
    w = GGUFWriter(os.path.join(HERE, "blocks.gguf"), "blocks")
    expected = {}
    for kind in KINDS:
        size, width = GGML_QUANT_SIZES[kind]
        if kind in SCALES:                       # every bit random, but for finite scales
            raw = rng.integers(0, 256, (2, 512 // size, width), dtype=np.uint8)
            for at in SCALES[kind]:
                scale = (rng.standard_normal((2, 512 // size, 1)) * 0.05).astype("<f2")
                raw[..., at:at + 2] = scale.view(np.uint8)
            raw = raw.reshape(2, -1)
        else:
            raw = quantize(rng.standard_normal((2, 512)).astype("<f4"), kind)
        if kind == Q.F32:
            w.add_tensor("kind.F32", raw)
            values = raw
        elif kind == Q.F16:
            w.add_tensor("kind.F16", raw)
            values = raw.astype("<f4")
        else:
            w.add_tensor(f"kind.{kind.name}", raw.view(np.uint8).reshape(2, -1), raw_dtype=kind)
            values = dequantize(raw, kind)
        expected["kind." + kind.name] = np.ascontiguousarray(values, "<f4").reshape(2, 512)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    with open(os.path.join(HERE, "blocks.f32"), "wb") as f:
        for name in sorted(expected):
            f.write(expected[name].tobytes())


def permute(w, heads):
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute"""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def byte_letters():
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return [chr(b) for b in keep] + [chr(256 + i) for i in range(len(rest))]


def tiny(rng):
    C, H, KV, D, F, L = 32, 4, 2, 8, 64, 2
    letters = byte_letters()
    merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + letters + [m.replace(" ", "") for m in merges]
    V = len(tokens)
    w = GGUFWriter(os.path.join(HERE, "tiny.gguf"), "llama")
    w.add_string("general.base_model.0.repo_url", "https://huggingface.co/owner/tiny")
    w.add_block_count(L); w.add_context_length(128); w.add_embedding_length(C); w.add_feed_forward_length(F)
    w.add_head_count(H); w.add_head_count_kv(KV); w.add_layer_norm_rms_eps(1e-5); w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(D); w.add_vocab_size(V)
    w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre("smollm"); w.add_token_list(tokens)
    w.add_token_types([3, 3, 3] + [1] * (V - 3)); w.add_token_merges(merges)
    w.add_bos_token_id(1); w.add_eos_token_id(2); w.add_pad_token_id(2); w.add_unk_token_id(0)
    w.add_add_bos_token(False); w.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    expected = {}

    def put(gguf, name, shape, kind, heads=None):
        x = (rng.standard_normal(shape) * 0.2 + (1 if len(shape) == 1 else 0)).astype("<f4")
        stored = permute(x, heads) if heads else x
        if kind == Q.F32:
            w.add_tensor(gguf, stored)
            expected[name] = x
            return
        w.add_tensor(gguf, quantize(stored, kind).view(np.uint8), raw_dtype=kind)
        # rows are coded one by one, so what was never permuted may be coded as it is
        expected[name] = np.ascontiguousarray(dequantize(quantize(x, kind), kind).reshape(shape), "<f4")

    put("token_embd.weight", "model.embed_tokens.weight", (V, C), Q.Q8_0)
    put("output_norm.weight", "model.norm.weight", (C,), Q.F32)
    for i in range(L):
        a, b = f"blk.{i}.", f"model.layers.{i}."
        kind = [Q.Q8_0, Q.BF16][i]
        put(a + "attn_norm.weight", b + "input_layernorm.weight", (C,), Q.F32)
        put(a + "attn_q.weight", b + "self_attn.q_proj.weight", (H * D, C), kind, H)
        put(a + "attn_k.weight", b + "self_attn.k_proj.weight", (KV * D, C), kind, KV)
        put(a + "attn_v.weight", b + "self_attn.v_proj.weight", (KV * D, C), Q.F16)
        put(a + "attn_output.weight", b + "self_attn.o_proj.weight", (C, H * D), kind)
        put(a + "ffn_norm.weight", b + "post_attention_layernorm.weight", (C,), Q.F32)
        put(a + "ffn_gate.weight", b + "mlp.gate_proj.weight", (F, C), kind)
        put(a + "ffn_up.weight", b + "mlp.up_proj.weight", (F, C), Q.Q4_0)
        put(a + "ffn_down.weight", b + "mlp.down_proj.weight", (C, F), kind)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    save_file(expected, os.path.join(HERE, "tiny.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    rng = np.random.default_rng(7)
    blocks(rng)
    tiny(rng)
