"""Writes the committed quantised cases: tiny bases in blocks, and the training results of transformers + PEFT +
torch.optim.AdamW on the same weights, dequantised by the packages that define the blocks.

usage: make_quantised.py OUT      (tests/golden/quantised was made with gguf 0.19.0, bitsandbytes 0.50.2 and those of
                                   make_parity.py)
OUT/gguf/model.gguf   every type of block but MXFP4, mixed within layers; embedding and head in other types
OUT/mxfp4/model.gguf  all matrices in MXFP4
OUT/nf4/model         a bitsandbytes checkpoint: layer 0 in plain NF4, layer 1 with its magnitudes quantised a second time
OUT/nf4/dequantised.safetensors  bitsandbytes' f32 values of the q_proj of both layers
OUT/nf4/down.q8_0     the gguf package's Q8_0 blocks of the down_proj of layer 0
OUT/nf4/plain         the same weights before quantisation, as a plain checkpoint
"""
import json, math, os, random, sys
import bitsandbytes.functional as bnb
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q, GGUFWriter, GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig

from make_parity import BATCH, CLIP, LR, SEVEN, STEPS, WARMUP, train

V = 120
BITS = {  # (byte of a half-precision scale, its size) so that random bits give weights of a sensible size
    Q.Q2_K: [(80, 0.0094), (82, 0.014)], Q.Q3_K: [(108, 0.0018)], Q.Q4_K: [(0, 0.0005), (2, 0.0037)],
    Q.Q5_K: [(0, 0.00025), (2, 0.0037)], Q.Q6_K: [(208, 0.000056)]}
KINDS = [[Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0], [Q.Q5_1, Q.Q4_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q6_K, Q.Q5_K]]
GGUF = dict(q_proj='attn_q', k_proj='attn_k', v_proj='attn_v', o_proj='attn_output', gate_proj='ffn_gate',
            up_proj='ffn_up', down_proj='ffn_down')


def sizes(hidden, forward):
    return dict(vocab_size=V, hidden_size=hidden, intermediate_size=forward, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6, eos_token_id=0, pad_token_id=1,
                bos_token_id=None, tie_word_embeddings=False, rope_theta=10000.0)


def fresh(config):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation='eager')
    for key, w in model.named_parameters():
        if 'norm' in key: torch.nn.init.normal_(w, mean=1.0, std=0.1)
        elif 'embed' not in key: torch.nn.init.normal_(w, std=1.2 / math.sqrt(w.shape[1]))
    return model


def case(out, model):
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=SEVEN, lora_dropout=0.0, task_type='CAUSAL_LM'))
    for key, w in peft.named_parameters():
        if 'lora_B' in key: torch.nn.init.normal_(w, std=0.05)
    peft.save_pretrained(f'{out}/adapter_init')
    rows = [dict(ids=[random.randrange(2, V) for _ in range(random.randint(2, 21))] + [0]) for _ in range(STEPS * BATCH)]
    train(out, peft, rows, dict(rank=4, alpha=8, lr=LR, warmup_steps=WARMUP, steps=STEPS, batch=BATCH, clip=CLIP))


def blocks(rng, w, kind):
    """Blocks of a matrix, or random ones of a type that the package only reads; and what they are worth."""
    if kind not in BITS:
        raw = quantize(w, kind)
        return raw, dequantize(raw, kind).reshape(w.shape)
    size, width = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (w.shape[0], w.shape[1] // size, width), dtype=np.uint8)
    for at, scale in BITS[kind]:
        scale = (scale * (1 + 0.2 * rng.standard_normal((*raw.shape[:2], 1)))).astype('<f2')
        raw[..., at:at + 2] = scale.view(np.uint8)
    raw = raw.reshape(w.shape[0], -1)
    return raw, dequantize(raw, kind).reshape(w.shape)


def permute(w, heads):
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute; on the bytes of rows as well"""
    return np.ascontiguousarray(w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape))


def gguf(out, C, F, matrices, ends):
    os.makedirs(out, exist_ok=True)
    rng = np.random.default_rng(7)
    H, KV, D = 4, 2, C // 4
    model = fresh(LlamaConfig(**sizes(C, F)))
    state = model.state_dict()
    w = GGUFWriter(f'{out}/model.gguf', 'llama')
    w.add_block_count(2); w.add_context_length(256); w.add_embedding_length(C); w.add_feed_forward_length(F)
    w.add_head_count(H); w.add_head_count_kv(KV); w.add_layer_norm_rms_eps(1e-6); w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(D); w.add_vocab_size(V); w.add_tokenizer_model('gpt2'); w.add_tokenizer_pre('smollm')
    w.add_token_list(['<|end|>', '<|pad|>'] + [chr(0x100 + i) for i in range(V - 3)] + [chr(0x100) + chr(0x101)])
    w.add_token_types([3, 3] + [1] * (V - 2)); w.add_token_merges([chr(0x100) + ' ' + chr(0x101)]); w.add_eos_token_id(0); w.add_pad_token_id(1)
    w.add_add_bos_token(False)

    def put(stored, name, kind, heads=None):
        raw, values = blocks(rng, state[name].numpy(), kind)
        w.add_tensor(stored, permute(raw, heads) if heads else raw, raw_dtype=kind)
        state[name].copy_(torch.from_numpy(values))

    put('token_embd.weight', 'model.embed_tokens.weight', ends[0])
    put('output.weight', 'lm_head.weight', ends[1])
    w.add_tensor('output_norm.weight', state['model.norm.weight'].numpy())
    for i, kinds in enumerate(matrices):
        for kind, module in zip(kinds, SEVEN):
            inside = 'self_attn' if module[0] in 'qkvo' else 'mlp'
            heads = {'q_proj': H, 'k_proj': KV}.get(module)
            put(f'blk.{i}.{GGUF[module]}.weight', f'model.layers.{i}.{inside}.{module}.weight', kind, heads)
        for stored, norm in [('attn_norm', 'input_layernorm'), ('ffn_norm', 'post_attention_layernorm')]:
            w.add_tensor(f'blk.{i}.{stored}.weight', state[f'model.layers.{i}.{norm}.weight'].numpy())
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    model.load_state_dict(state)
    case(out, model)


def nf4(out):
    os.makedirs(f'{out}/model', exist_ok=True)
    model = fresh(LlamaConfig(**sizes(64, 128), head_dim=16)).to(torch.bfloat16)
    model.save_pretrained(f'{out}/plain')
    down = model.state_dict()['model.layers.0.mlp.down_proj.weight'].float().numpy()
    quantize(down, Q.Q8_0).tofile(f'{out}/down.q8_0')
    tokens = Tokenizer(models.WordLevel({f't{i}': i for i in range(V)}, unk_token='t0'))
    stored, state, worth = {}, model.float().state_dict(), {}
    for name, w in state.items():
        if name.split('.')[-2] not in SEVEN:
            stored[name] = w.to(torch.bfloat16)
            continue
        packed, about = bnb.quantize_4bit(w.to(torch.bfloat16), blocksize=64, quant_type='nf4', compress_statistics='layers.1' in name)
        stored[name] = packed
        stored.update({f'{name}.{key}': value for key, value in about.as_dict(packed=True).items()})
        about.dtype = torch.float32
        w.copy_(bnb.dequantize_4bit(packed, about))
        if 'q_proj' in name: worth[name] = w.clone()
    save_file(worth, f'{out}/dequantised.safetensors', metadata={'format': 'pt'})
    save_file({k: v.contiguous() for k, v in stored.items()}, f'{out}/model/model.safetensors', metadata={'format': 'pt'})
    config = json.load(open(f'{out}/plain/config.json'))
    config['quantization_config'] = dict(quant_method='bitsandbytes', load_in_4bit=True, load_in_8bit=False,
                                         bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True,
                                         bnb_4bit_compute_dtype='bfloat16', bnb_4bit_quant_storage='uint8')
    json.dump(config, open(f'{out}/model/config.json', 'w'), indent=2)
    for folder in ('plain', 'model'): tokens.save(f'{out}/{folder}/tokenizer.json')
    if os.path.exists(f'{out}/plain/generation_config.json'): os.remove(f'{out}/plain/generation_config.json')
    # A new model: one that was in bf16 keeps rounded rotary angles.
    model = fresh(model.config)
    model.load_state_dict(state)
    case(out, model)


if __name__ == '__main__':
    torch.manual_seed(11); random.seed(11)
    gguf(f'{sys.argv[1]}/gguf', 256, 256, KINDS, [Q.Q6_K, Q.Q8_0])
    nf4(f'{sys.argv[1]}/nf4')
    torch.manual_seed(12); random.seed(12)
    gguf(f'{sys.argv[1]}/mxfp4', 64, 128, [[Q.MXFP4] * 7] * 2, [Q.MXFP4] * 2)
