"""Writes a GGUF of Llama 2 7B's shape with random Q4_K blocks (3.8 GB), or of Llama 3.1 8B's (4.5 GB), and rows of about
512 tokens.

usage: quantised_7b.py OUT.gguf ROWS.jsonl [8b]       needs: pip install gguf numpy
Then, for the peak memory and the time of one step of 512 tokens:
  /usr/bin/time -v finetune OUT.gguf --data ROWS.jsonl --max-seq-len 512 --micro-batch-tokens 512 --batch-size 1 \
    --max-steps 1 -o out
With streamed layers: --memory-limit 3GB; over two devices: --gpus cpu+cpu, or two workers and --stages 2.
"""
import json, sys
import numpy as np
from gguf import GGMLQuantizationType as Q, GGUFWriter

C, F, H, G, L, V = 4096, 11008, 32, 32, 32, 32000
if sys.argv[3:] == ['8b']: F, G, V = 14336, 8, 128256
rng = np.random.default_rng(1)


def blocks(rows, cols):
    raw = rng.integers(0, 256, (rows, cols // 256, 144), dtype=np.uint8)
    # d and dmin give weights of about 1 / sqrt(cols)
    for at, scale in [(0, 0.0067), (2, 0.05)]:
        raw[..., at:at + 2] = np.array([scale / np.sqrt(cols)], '<f2').view(np.uint8)
    return raw.reshape(rows, -1)


w = GGUFWriter(sys.argv[1], 'llama', use_temp_file=False)
w.add_block_count(L); w.add_context_length(4096); w.add_embedding_length(C); w.add_feed_forward_length(F)
w.add_head_count(H); w.add_head_count_kv(G); w.add_layer_norm_rms_eps(1e-5); w.add_rope_freq_base(10000.0)
w.add_rope_dimension_count(C // H); w.add_vocab_size(V); w.add_tokenizer_model('gpt2'); w.add_tokenizer_pre('smollm')
letters = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]]
letters += [chr(256 + i) for i in range(256 - len(letters))]
w.add_token_list(['<|end|>', *letters, 'zz', *(f'<{i}>' for i in range(V - 258))])
w.add_token_types([3] + [1] * (V - 1)); w.add_token_merges(['z z']); w.add_eos_token_id(0); w.add_add_bos_token(False)
sizes = {'token_embd': (V, C), 'output': (V, C)}
for i in range(L):
    for name in ('attn_q', 'attn_k', 'attn_v', 'attn_output'):
        sizes[f'blk.{i}.{name}'] = (C // H * G if name in ('attn_k', 'attn_v') else C, C)
    for name in ('ffn_gate', 'ffn_up'): sizes[f'blk.{i}.{name}'] = (F, C)
    sizes[f'blk.{i}.ffn_down'] = (C, F)
    for name in ('attn_norm', 'ffn_norm'): sizes[f'blk.{i}.{name}'] = (C,)
sizes['output_norm'] = (C,)
for name, shape in sizes.items():
    if len(shape) == 1: w.add_tensor_info(f'{name}.weight', shape, np.dtype('<f4'), 4 * C)
    else: w.add_tensor_info(f'{name}.weight', (shape[0], shape[1] // 256 * 144), np.dtype(np.uint8), shape[0] * shape[1] // 256 * 144, Q.Q4_K)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_ti_data_to_file()
for shape in sizes.values():
    w.write_tensor_data(np.ones(shape, '<f4') if len(shape) == 1 else blocks(*shape))
w.close()
with open(sys.argv[2], 'w') as f:
    for _ in range(4): f.write(json.dumps(dict(text=''.join(rng.choice(list('abcdefgh '), 511)))) + '\n')
