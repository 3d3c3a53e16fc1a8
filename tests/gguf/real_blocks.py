"""Prints type, SHA-256 of the f32 values and name of every tensor of a file, as the gguf package reads them.

usage: real_blocks.py MODEL.gguf > MODEL.sums      needs: pip install gguf
Then: FINETUNE_REAL_BLOCKS=MODEL.gguf cargo test --test format_gguf real_blocks -- --nocapture
"""
import hashlib, sys
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

for t in sorted(GGUFReader(sys.argv[1]).tensors, key=lambda t: t.name):
    numbers = np.ascontiguousarray(dequantize(t.data, t.tensor_type), dtype='<f4')
    print(t.tensor_type.name, hashlib.sha256(numbers.tobytes()).hexdigest(), t.name)
