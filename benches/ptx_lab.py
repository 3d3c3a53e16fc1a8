#!/usr/bin/env python3
"""The PTX kernels straight through libcuda, without Rust: edit a .ptx, run again. Each case is a process of its own with a
time limit, so that a fault or a hang costs one line. Needs numpy; torch, where it is there, computes large references.
Not run on a card yet.

usage: ptx_lab.py [--ptx DIR] [--match SUBSTRING] [--limit SECONDS] [--list]

One line a case: PASS|FAIL|FAULT|HANG|SKIP name ms TFLOP/s. Where it FAILs, a map of the first 128 x 256 outputs in pieces
of 8 x 8: '.' right, '+' some wrong, '#' all wrong, 'p' never written, 'n' not finite."""
import argparse, ctypes as C, math, os, subprocess, sys, time
import numpy as np

GEMM = [(128, 256, 64), (128, 256, 128), (128, 256, 640), (256, 512, 320), (133, 270, 587), (1000, 2560, 2560),
        (8192, 2560, 2560), (8192, 9728, 2560), (256, 151936, 2560), (256, 2560, 151936), (4096, 4096, 4096), (8192, 8192, 8192)]
ROWS = {"one": [0, 128], "odd": [0, 3, 4, 263], "long": [0, 4096]}


def cases():
    for tier in ("sm80", "sm90a"):
        for way in ("nt", "nn"):
            for s in GEMM:
                for stem in ("product", "lora_linear"):
                    for add in (0, 1):
                        yield f"{stem}_{tier}_{way}/{s[0]}x{s[1]}x{s[2]}/{add}"
    for tier in ("sm80", "sm90a"):
        for d in (64, 128):
            for rows in ROWS:
                yield f"attention_{tier}_{d}/{rows}"


def found(folder, file):
    return next(os.path.join(at, file) for at, _, files in os.walk(folder) if file in files)


class Card:
    def __init__(self, folder):
        self.folder, self.cu, self.keep = folder, C.CDLL("libcuda.so.1"), []
        self.call("cuInit", 0)
        dev, ctx, self.stream, v = C.c_int(), C.c_void_p(), C.c_void_p(), C.c_int()
        self.call("cuDriverGetVersion", C.byref(v))
        self.call("cuDeviceGet", C.byref(dev), int(os.environ.get("FINETUNE_PTX_DEVICE", 0)))
        self.call("cuDevicePrimaryCtxRetain", C.byref(ctx), dev)
        self.call("cuCtxSetCurrent", ctx)
        self.call("cuStreamCreate", C.byref(self.stream), 1)
        at = lambda a: (lambda n: (self.call("cuDeviceGetAttribute", C.byref(n), a, dev), n.value)[1])(C.c_int())
        self.sms, self.cc, self.version = at(16), (at(75), at(76)), v.value

    def call(self, name, *args):
        code = getattr(self.cu, name)(*args)
        if code:
            print(f"FAULT {name} {code}", flush=True)
            os._exit(3)

    def load(self, file, entry, shared):
        text = open(found(self.folder, file), "rb").read() + b"\0"
        log, m, f, n = C.create_string_buffer(1 << 16), C.c_void_p(), C.c_void_p(), C.c_int()
        keys = (C.c_int * 3)(3, 4, 12)  # INFO_LOG_BUFFER, its size, LOG_VERBOSE
        vals = (C.c_void_p * 3)(C.cast(log, C.c_void_p), 1 << 16, 1)
        began = time.time()
        self.call("cuModuleLoadDataEx", C.byref(m), text, 3, keys, vals)
        print(f"# {file}: loaded in {time.time() - began:.2f} s", flush=True)
        for line in log.value.decode(errors="replace").splitlines():
            if any(w in line for w in ("serialized", "spill", "warning")) and "0 bytes spill stores, 0 bytes" not in line:
                print("#", line.strip())
        self.call("cuModuleGetFunction", C.byref(f), m, entry.encode())
        if shared:
            self.call("cuFuncSetAttribute", f, 8, shared)
        self.call("cuFuncGetAttribute", C.byref(n), 4, f)
        print(f"# {entry}: {n.value} registers", flush=True)
        return f

    def put(self, x):
        x, p = np.ascontiguousarray(x), C.c_uint64()
        self.call("cuMemAlloc_v2", C.byref(p), C.c_size_t(max(x.nbytes, 4)))
        self.call("cuMemcpyHtoDAsync_v2", p, x.ctypes.data_as(C.c_void_p), C.c_size_t(x.nbytes), self.stream)
        self.keep.append(x)
        return p.value

    def get(self, p, like):
        out = np.empty_like(like)
        self.call("cuMemcpyDtoHAsync_v2", out.ctypes.data_as(C.c_void_p), C.c_uint64(p), C.c_size_t(out.nbytes), self.stream)
        self.wait()
        return out

    def map(self, at, rows, cols, box_rows):
        raw = C.create_string_buffer(256)
        here = (C.addressof(raw) + 127) // 128 * 128
        u64, u32 = lambda *v: (C.c_uint64 * len(v))(*v), lambda *v: (C.c_uint32 * len(v))(*v)
        stride = (cols + 7) // 8 * 16
        self.call("cuTensorMapEncodeTiled", C.c_void_p(here), 9, 2, C.c_void_p(at), u64(cols, rows), u64(stride),
                  u32(64, box_rows), u32(1, 1), 0, 3, 3, 0)
        self.keep.append(raw)
        return C.c_void_p(here)  # already the pointer to the argument

    def launch(self, f, grid, threads, shared, args):
        cells = [a if isinstance(a, C.c_void_p) else C.cast(C.pointer(a), C.c_void_p) for a in args]
        self.call("cuLaunchKernel", f, *grid, threads, 1, 1, shared, self.stream, (C.c_void_p * len(cells))(*cells), None)

    def wait(self):
        if not hasattr(self.cu, "cuStreamQuery"):
            return self.call("cuStreamSynchronize", self.stream)
        until = time.time() + float(os.environ.get("LAB_WAIT", 8))
        while (code := self.cu.cuStreamQuery(self.stream)) == 600:
            if time.time() > until:
                print("HANG", flush=True)
                os._exit(4)
            time.sleep(0.0005)
        if code:
            print(f"FAULT after a launch: {code}", flush=True)
            os._exit(3)

    def ms(self, work, times=10):
        work(), self.wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - began) / times * 1e3


def bf16(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def wide(h):
    return (h.astype(np.uint32) << 16).view(np.float32)


def padded(h):
    out = np.zeros((h.shape[0], (h.shape[1] + 7) // 8 * 8), np.uint16)
    out[:, : h.shape[1]] = h
    return out


def product(a, b):
    if a.shape[0] * b.shape[1] * a.shape[1] > 1 << 31:  # torch takes seconds to import
        try:
            import torch
            if torch.cuda.is_available():
                torch.backends.cuda.matmul.allow_tf32 = False
                return (torch.from_numpy(a).cuda() @ torch.from_numpy(np.ascontiguousarray(b)).cuda()).cpu().numpy()
        except ImportError:
            pass
    return a.astype(np.float64) @ b.astype(np.float64) if a.size < 1 << 22 else a @ b


def told(name, got, want, bound, poison, ms, flops):
    off = np.abs(got - want) / bound
    bad = ~(off <= 1)
    speed = f"{ms:.3f} ms {flops / ms / 1e9:.0f} TFLOP/s"
    if not bad.any():
        return print(f"PASS {name} {speed} worst {off.max():.2f} of the bound", flush=True)
    print(f"FAIL {name} {speed} wrong {bad.mean():.4f}, first at {np.argwhere(bad)[0].tolist()}", flush=True)
    for r in range(0, min(128, got.shape[0]), 8):
        line = ""
        for c in range(0, min(256, got.shape[1]), 8):
            g, w = got[r:r + 8, c:c + 8], bad[r:r + 8, c:c + 8]
            line += "p" if (g == poison).any() else "n" if not np.isfinite(g).all() else "#" if w.all() else "+" if w.any() else "."
        print("#", line)


def gemm(card, name):
    entry, size, add = name.split("/")
    (m, n, k), add = map(int, size.split("x")), int(add)
    stem, tier, way = entry.rsplit("_", 2)
    hopper, lora = tier == "sm90a", stem == "lora_linear"
    if hopper and (card.cc != (9, 0) or m < 128 or n < 256 or k < 64):
        return print("SKIP", name)
    rng = np.random.default_rng(1)
    make = lambda *s: bf16(rng.uniform(-1, 1, s).astype(np.float32))
    a, b = make(m, k), make(n, k) if way == "nt" else make(k, n)
    old, r, by = rng.uniform(-1, 1, (m, n)).astype(np.float32), 16, 0.5
    left = rng.uniform(-1, 1, (m, r)).astype(np.float32)
    right = rng.uniform(-1, 1, (n, r) if way == "nt" else (r, n)).astype(np.float32)
    poison = np.float32(-1234.5)
    file = f"{stem}_{tier}.ptx"
    budget = [l for l in open(found(card.folder, file)) if l.startswith("// budget:")][0]
    shared = int(budget.split()[4]) if hopper else 0
    f = card.load(file, entry, shared)
    pa, pb = card.put(padded(a)), card.put(padded(b))
    out = card.put(old if add else np.full((m, n), poison))
    u, q, fl = C.c_uint32, C.c_uint64, C.c_float
    tail = [q(card.put(left)), q(card.put(right)), u(r), u(r if way == "nt" else n), fl(by)] if lora else []
    if hopper:
        maps = [card.map(pa, m, k, 128), card.map(pb, *b.shape, 256 if way == "nt" else 64)]
        args = [q(out), *maps, u(m), u(n), u(k), u(n), u(add)] + tail
        grid, threads = (min(-(-m // 128) * -(-n // 256), card.sms), 1, 1), 384
    else:
        lda, ldb = (k + 7) // 8 * 8, (b.shape[1] + 7) // 8 * 8
        args = [q(out), q(pa), q(pb), u(m), u(n), u(k), u(lda), u(ldb), u(n), fl(1.0), u(add)] + tail
        grid, threads = (-(-n // 128), -(-m // 128), 1), 256
    go = lambda: card.launch(f, grid, threads, shared, args)
    go()
    got = card.get(out, old)
    x, y = wide(a), wide(b).T if way == "nt" else wide(b)
    want = product(x, y) + (old if add else 0)
    if lora:
        want = want + by * (left @ (right.T if way == "nt" else right))
    bound = 1e-4 * (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=0)[None] + 1)
    told(name, got, want, bound, poison, card.ms(go), 2.0 * m * n * k)


def attention(card, name):
    entry, rows = name.split("/")
    _, tier, d = entry.split("_")
    d, bounds, (hq, hkv) = int(d), ROWS[rows], (4, 2) if ROWS[rows][-1] < 4096 else (32, 8)
    hopper, t = tier == "sm90a", ROWS[rows][-1]
    if hopper and card.cc != (9, 0):
        return print("SKIP", name)
    rng = np.random.default_rng(2)
    make = lambda h, by: bf16((by * rng.uniform(-1, 1, (t, h * d))).astype(np.float32))
    q, k, v = make(hq, 3), make(hkv, 1), make(hkv, 1)
    blocks = np.array([[i, min(128, e - i), s, e] for s, e in zip(bounds, bounds[1:]) for i in range(s, e, 128)], np.uint32)
    poison = np.float32(-1234.5)
    like, lse = np.full((t, hq * d), poison), np.full((t, hq), poison)
    file = f"attention_{tier}.ptx"
    budget = [l for l in open(found(card.folder, file)) if l.startswith("// budget:")][0]
    shared = int(budget.split()[4]) if hopper else 0
    f = card.load(file, entry, shared)
    out, plse, pq, pk, pv, pb = (card.put(x) for x in (like, lse, q, k, v, blocks))
    u, w, fl = C.c_uint32, C.c_uint64, C.c_float
    three = [(pq, hq), (pk, hkv), (pv, hkv)]
    mid = [card.map(p, t, h * d, 128) for p, h in three] if hopper else [w(p) for p, _ in three]
    args = [w(out), w(plse), *mid, w(pb), u(hq), u(hkv), *([] if hopper else [u(d)]), fl(1 / math.sqrt(d)), u(1 << 30)]
    go = lambda: card.launch(f, (len(blocks), hq, 1), 384 if hopper else 128, shared, args)
    go()
    got = card.get(out, like)
    heads = range(hq) if t < 4096 else [0, hq - 1]
    ms = card.ms(go)
    Q, K, V = (wide(x).astype(np.float64) for x in (q, k, v))
    for h in heads:
        g = h // (hq // hkv)
        cols, want = slice(h * d, h * d + d), np.zeros((t, d))
        for s, e in zip(bounds, bounds[1:]):
            sc = Q[s:e, cols] @ K[s:e, g * d:g * d + d].T / math.sqrt(d)
            sc[np.triu_indices(e - s, 1)] = -np.inf
            p = np.exp(sc - sc.max(1, keepdims=True))
            want[s:e] = p / p.sum(1, keepdims=True) @ V[s:e, g * d:g * d + d]
        bound = np.linalg.norm(want, axis=1, keepdims=True) / 64 / math.sqrt(d) * 4 + 1e-4
        flops = sum(2.0 * (e - s) ** 2 * hq * d for s, e in zip(bounds, bounds[1:]))
        told(f"{name}/head{h}", got[:, cols], want, bound, poison, ms, flops)


p = argparse.ArgumentParser()
p.add_argument("--ptx", default="kernels/ptx")
p.add_argument("--match", default="")
p.add_argument("--limit", type=float, default=60)
p.add_argument("--list", action="store_true")
p.add_argument("--case")
o = p.parse_args()
if o.case:
    card = Card(o.ptx)
    (attention if o.case.startswith("attention") else gemm)(card, o.case)
    sys.stdout.flush()
    os._exit(0)
try:
    C.CDLL("libcuda.so.1")
except OSError:
    sys.exit(print("skipped: no cuda"))
wrong = 0
for name in cases():
    if o.match not in name:
        continue
    if o.list:
        print(name)
        continue
    try:
        done = subprocess.run([sys.executable, __file__, "--ptx", o.ptx, "--case", name], timeout=o.limit,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said, bad = done.stdout, done.returncode != 0
        if bad:
            said = f"{'HANG' if done.returncode == 4 else 'FAULT'} {name} (exit {done.returncode})\n" + said
    except subprocess.TimeoutExpired as e:
        said, bad = f"HANG {name} (killed after {o.limit:.0f} s)\n" + ((e.stdout or b"").decode(errors="replace")), True
    print(said.strip(), flush=True)
    wrong += bad or "\nFAIL" in "\n" + said or not any(w in said for w in ("PASS", "SKIP"))
sys.exit(wrong > 0)
