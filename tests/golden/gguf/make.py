#!/usr/bin/env python3
"""Makes the golden GGUF files beside it. Needs: pip install gguf numpy safetensors

blocks.gguf    one tensor per storage kind, [2, 512], random blocks
blocks.f32     their values by the gguf package: f32, little endian, tensors in order of name
tiny.gguf      a small Llama as llama.cpp stores it (q and k permuted; F32, F16, BF16 and Q8_0)
tiny.safetensors   its weights under Hugging Face names, never permuted
tokenizers.json    how transformers and tokenizers split text for each `pre`, and a sentencepiece vocabulary with the
               merges and ids that they derive from it (needs: pip install transformers tokenizers)
"""
import json
import os
import numpy as np
from gguf import GGMLQuantizationType as Q, GGUFWriter, GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K,
         Q.MXFP4]
# offsets of the f16 scales in a block
SCALES = {Q.Q8_0: [0], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q2_K: [80, 82], Q.Q3_K: [108],
          Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208]}
# exponents of 32 blocks of MXFP4: subnormal powers of two, the largest that is finite with every code, usual ones
EXPONENTS = np.array([0, 1, 2, 3, 252, *range(110, 137)], np.uint8)


def blocks(rng):
    w = GGUFWriter(os.path.join(HERE, "blocks.gguf"), "blocks")
    expected = {}
    for kind in KINDS:
        size, width = GGML_QUANT_SIZES[kind]
        if kind in SCALES:                       # random bits, with finite scales
            raw = rng.integers(0, 256, (2, 512 // size, width), dtype=np.uint8)
            for at in SCALES[kind]:
                scale = (rng.standard_normal((2, 512 // size, 1)) * 0.05).astype("<f2")
                raw[..., at:at + 2] = scale.view(np.uint8)
            raw = raw.reshape(2, -1)
        elif kind == Q.MXFP4:                    # its own stream, so that what is drawn below stays the same
            raw = np.random.default_rng(39).integers(0, 256, (2, 512 // size, width), dtype=np.uint8)
            raw[..., 0] = EXPONENTS.reshape(2, -1)
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
        # rows are encoded separately, so the values that were never permuted can be encoded directly
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


TEXTS = [
    "Hello world, it's 2024!  x\n\tdef f(): return 12345", "naïve café – 日本語 🙂 ＡＢＣ１２３", "", " ", "  two  spaces  ",
    "I'LL we'Ve don't DON'T 's", "a\r\n\r\nb\n \n c", "e\u0301tude ﬁn Å", "$1,000.50 (100%) #tag @x //path/to\n/",
    "CamelCase HTTPServer ÀÉÎ straße ǅ", "\u00a0nbsp\u3000wide\u200bzero", "مرحبا ١٢٣ नमस्ते २०", "ends with space ",
]


def pre_tokenizers_as_published():
    from tokenizers import Regex, normalizers, pre_tokenizers as p
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS
    rules = {"gpt-2": p.ByteLevel(add_prefix_space=False, use_regex=True),
             "smollm": p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False)])}
    for pre in ["qwen2", "deepseek-r1-qwen", "megrez", "llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "tekken"]:
        rules[pre] = p.Sequence([p.Split(Regex(SPLITS[pre]), "isolated"),
                                 p.ByteLevel(add_prefix_space=False, use_regex=False)])
    nfc = normalizers.NFC()
    cut = lambda pre, t: [x for x, _ in rules[pre].pre_tokenize_str(nfc.normalize_str(t) if SPLITS.get(pre) == SPLITS["qwen2"] else t)]
    return {pre: [cut(pre, t) for t in TEXTS] for pre in rules}


def sentencepiece(rng):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import generate_merges
    learn = Tokenizer(models.BPE())
    learn.pre_tokenizer = pre_tokenizers.Metaspace()
    learn.train_from_iterator(TEXTS * 3 + ["the then there other mother ether the the"],
                              trainers.BpeTrainer(vocab_size=220, show_progress=False))
    pieces = [t for t, _ in sorted(learn.get_vocab().items(), key=lambda x: x[1])]
    letters = [t for t in pieces if len(t) == 1]
    longer = [t for t in pieces if len(t) > 1]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + longer + letters
    types = [2, 3, 3] + [6] * 256 + [1] * (len(longer) + len(letters))
    # sentencepiece counts down; a few equal scores test the order of equal ones
    scores = [0.0] * 259 + [-float(i // 3) for i in range(len(longer))] + [-1000.0 - i for i in range(len(letters))]
    special = tokens[:259]
    merges = generate_merges({t: i for i, t in enumerate(tokens)}, dict(zip(tokens, scores)), skip_tokens=special)
    t = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return {"tokens": tokens, "types": types, "scores": scores, "merges": merges,
            "ids": [t.encode(x, add_special_tokens=False).ids for x in TEXTS]}


def tokenizers(rng):
    with open(os.path.join(HERE, "tokenizers.json"), "w") as f:
        json.dump({"texts": TEXTS, "pre": pre_tokenizers_as_published(), "sentencepiece": sentencepiece(rng)}, f,
                  separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    rng = np.random.default_rng(7)
    blocks(rng)
    tiny(rng)
    tokenizers(rng)
