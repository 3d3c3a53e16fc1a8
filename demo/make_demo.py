"""Makes demo/model, demo/train.jsonl and demo/eval.jsonl from intents.txt and words.txt, without any download.

Rule: the model never sees the task of the rows (a request in words -> a command). It is pre-trained to say requests
in other words, to explain commands, to list names and to repeat text, and on lines of a shell's history; the rows
ask for the command.

usage: make_demo.py [--steps 900] [--rows-only]
needs: jax, numpy, safetensors, tokenizers
"""
import argparse, json, math, os, random, re, time

HERE = os.path.dirname(os.path.abspath(__file__))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LENGTH, BATCH = 128, 32
EXTENSIONS = "txt md py rs js html css csv json log sh toml yaml sql xml conf".split()
VERBS = "add fix remove rename test check clean document improve move update simplify speed explain".split()
PORTS = [80, 443, 3000, 3306, 5000, 5432, 6379, 8000, 8080, 8443, 9000, 9090]
COUNTS = [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 20, 25, 30, 40, 50, 60, 80, 100, 200, 500]


def lines(name):
    return [line for line in open(os.path.join(HERE, name), encoding="utf-8").read().split("\n") if not line.startswith("#")]


def intents():
    """(command, explanation, requests) of every block."""
    blocks = [block.split("\n") for block in "\n".join(lines("intents.txt")).strip().split("\n\n")]
    return [(block[0], block[1], block[2:]) for block in blocks]


class Names:
    """Values of the slots; `strange` is the share of invented words, which teach to copy what was never seen."""

    def __init__(self, words, rng, strange):
        self.words, self.rng, self.strange = words, rng, strange

    def word(self):
        if self.rng.random() < self.strange:
            parts = [self.rng.choice("bcdfghjklmnprstvwz") + self.rng.choice("aeiou") + self.rng.choice(["", "", "n", "r", "s", "l"])
                     for _ in range(self.rng.randint(1, 3))]
            return "".join(parts)
        return self.rng.choice(self.words)

    def joined(self, marks):
        return self.word() + (self.rng.choice(marks) + self.word() if self.rng.random() < 0.3 else "")

    def file(self):
        return self.joined("-_") + "." + self.rng.choice(EXTENSIONS)

    def slots(self):
        pick = self.rng.choice
        return {
            "file": self.file(), "other": self.file(), "dir": self.joined("-/"), "place": self.joined("-/"),
            "ext": pick(EXTENSIONS), "n": str(pick(COUNTS)), "word": self.word(), "branch": self.joined("-/"),
            "message": f'"{pick(VERBS)} the {self.word()}"', "host": self.word(),
            "port": str(pick(PORTS)), "name": self.word(),
        }


def fill(text, slots):
    return re.sub(r"\{(\w+)\}", lambda m: slots[m[1]], text)


def turn(user, assistant):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"


def document(all_intents, names):
    """One document of pre-training. None holds a request and its command."""
    rng = names.rng
    command, what, asked = rng.choice(all_intents)
    slots = names.slots()
    kind = rng.random()
    if kind < 0.30:
        one, other = rng.sample(asked, 2)
        return turn(fill(one, slots), "In other words: " + fill(other, slots))
    if kind < 0.45:
        return turn("What does this do?\n" + fill(command, slots), f"It {fill(what, slots)}.")
    if kind < 0.60:
        request = rng.choice(asked)
        return turn("Which names are in this?\n" + fill(request, slots), "\n".join(slots[k] for k in re.findall(r"\{(\w+)\}", request)))
    if kind < 0.65:
        return "".join(fill(rng.choice(all_intents)[0], names.slots()) + "\n" for _ in range(rng.randint(2, 6)))
    text = " ".join(rng.choice([names.word, names.file, lambda: names.joined("-/"), lambda: str(rng.choice(COUNTS + PORTS))])()
                    for _ in range(rng.randint(1, 8)))
    if kind < 0.90:
        return turn("Repeat this.\n" + text, text)
    mark = rng.choice(["''", '""', "()", "[]", "-:", "+M"])
    return turn(f"Put {mark} around each part.\n" + text, " ".join(mark[0] + part + mark[1] for part in text.split()))


def rows(all_intents, words, per_intent, taken, rng):
    """Requests with their commands, no request twice or in `taken`, every intent and phrasing about equally often."""
    names, out = Names(words, rng, 0.0), []
    for command, _, asked in all_intents:
        made = 0
        while made < per_intent:
            slots = names.slots()
            request = fill(asked[made % len(asked)], slots)
            if request not in taken and slots["file"] != slots["other"] and slots["dir"] != slots["place"]:
                taken.add(request)
                out.append(dict(instruction=request, output=fill(command, slots)))
                made += 1
    rng.shuffle(out)
    return out


def save_rows(rows, name):
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def tokenizer(docs, path):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tok.train_from_iterator(docs, trainer)
    tok.save(path)
    return tok


def packed(tok, docs):
    """Rows of LENGTH ids filled with whole documents; for each position the number of its document, and whether it
    counts in the loss: answers and lines of a history do, questions do not."""
    import numpy as np
    rows, row = [], []
    for i, encoded in enumerate(tok.encode_batch(docs, add_special_tokens=False), 1):
        ids = encoded.ids[:LENGTH]
        starts = [k for k, token in enumerate(ids) if token == 1]
        answer = starts[1] + 3 if len(starts) > 1 else 0
        doc = [(token, i, k >= answer) for k, token in enumerate(ids)]
        if len(row) + len(doc) > LENGTH:
            rows.append(row + [(0, 0, False)] * (LENGTH - len(row)))
            row = []
        row += doc
    return np.array(rows, np.int32).transpose(2, 0, 1)


def initial(c, rng):
    """Weights by the names that transformers gives them; matrices are [out, in]."""
    import numpy as np
    h, f = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, shape in [("self_attn.q_proj", (q, h)), ("self_attn.k_proj", (kv, h)), ("self_attn.v_proj", (kv, h)),
                            ("self_attn.o_proj", (h, q)), ("mlp.gate_proj", (f, h)), ("mlp.up_proj", (f, h)),
                            ("mlp.down_proj", (h, f)), ("input_layernorm", (h,)), ("post_attention_layernorm", (h,))]:
            shapes[f"{at}{name}.weight"] = shape
    return {k: np.ones(s, np.float32) if len(s) == 1 else rng.normal(0, 0.02 if "embed" in k else s[1] ** -0.5, s).astype(np.float32)
            for k, s in shapes.items()}


def logits(w, ids, segments, c):
    import jax
    import jax.numpy as jnp
    batch, length = ids.shape
    heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    angles = jnp.arange(length)[:, None] * c["rope_parameters"]["rope_theta"] ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c["rms_norm_eps"]) * scale

    def rotated(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    seen = jnp.tril(jnp.ones((length, length), bool)) & (segments[:, :, None] == segments[:, None, :])
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        m = lambda name: w[f"model.layers.{i}.{name}.weight"]
        y = norm(x, m("input_layernorm"))
        q = rotated((y @ m("self_attn.q_proj").T).reshape(batch, length, heads, size))
        k = rotated((y @ m("self_attn.k_proj").T).reshape(batch, length, groups, size))
        v = (y @ m("self_attn.v_proj").T).reshape(batch, length, groups, size)
        k, v = (jnp.repeat(t, heads // groups, 2) for t in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * size ** -0.5
        scores = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), -1)
        x += jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(batch, length, heads * size) @ m("self_attn.o_proj").T
        y = norm(x, m("post_attention_layernorm"))
        x += (jax.nn.silu(y @ m("mlp.gate_proj").T) * (y @ m("mlp.up_proj").T)) @ m("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def orthogonal(g):
    """About the nearest matrix of orthogonal rows or columns: five Newton-Schulz steps, as in the optimizer Muon."""
    import jax.numpy as jnp
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        y = x @ x.T
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return (x.T if g.shape[0] > g.shape[1] else x) * max(1.0, g.shape[0] / g.shape[1]) ** 0.5


def pretrain(w, c, data, steps, peak=0.02):
    """Muon for the matrices of the layers, Adam for the embedding and the scales."""
    import jax
    import jax.numpy as jnp
    import numpy as np


    def loss_of(w, ids, segments, counts):
        same = (segments[:, 1:] == segments[:, :-1]) & (counts[:, 1:] > 0)
        logp = jax.nn.log_softmax(logits(w, ids, segments, c)[:, :-1])
        picked = jnp.take_along_axis(logp, ids[:, 1:, None], -1)[..., 0]
        return -jnp.sum(picked * same) / jnp.sum(same)

    @jax.jit
    def step(w, m, v, t, rate, ids, segments, counts):
        loss, g = jax.value_and_grad(loss_of)(w, ids, segments, counts)
        muon = lambda k: "_proj" in k
        m = {k: 0.95 * m[k] + g[k] if muon(k) else 0.9 * m[k] + 0.1 * g[k] for k in w}
        v = {k: v[k] if muon(k) else 0.95 * v[k] + 0.05 * g[k] ** 2 for k in w}
        adam = lambda k: m[k] / (1 - 0.9 ** t) / (jnp.sqrt(v[k] / (1 - 0.95 ** t)) + 1e-8)
        move = {k: orthogonal(g[k] + 0.95 * m[k]) + 0.02 * w[k] if muon(k) else 0.25 * adam(k) for k in w}
        return {k: w[k] - rate * move[k] for k in w}, m, v, loss

    m = v = {k: np.zeros_like(x) for k, x in w.items()}
    begun = time.time()
    rng = np.random.default_rng(1)
    for t in range(1, steps + 1):
        rate = peak * min(1.0, t / 30, 1.7 * (steps - t) / steps + 0.01)
        pick = rng.choice(data.shape[1], BATCH, replace=False)
        w, m, v, loss = step(w, m, v, float(t), rate, *data[:, pick])
        if t % 20 == 0 or t == steps:
            took = time.time() - begun
            print(f"step {t} loss {float(loss):.4f} {took:.0f} s {t * BATCH * LENGTH / took:.0f} tokens/s", flush=True)
    return w


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=900)
    p.add_argument("--documents", type=int, default=110_000)
    p.add_argument("--rows-only", action="store_true")
    p.add_argument("--model", default=os.path.join(HERE, "model"))
    a = p.parse_args()
    all_intents, words = intents(), [word for line in lines("words.txt") for word in line.split()]
    taken = set()
    # Every fifth word is kept for evaluation: no name in its rows occurs in a row for training.
    evaluation = rows(all_intents, words[::5], 2, taken, random.Random(1))
    train = rows(all_intents, [word for i, word in enumerate(words) if i % 5], 24, taken, random.Random(2))
    # The first ten of evaluation, which the run asks, are of ten commands.
    first = {}
    for row in evaluation:
        first.setdefault(row["output"].split()[0], row)
    shown = list(first.values())[:10]
    evaluation = shown + [row for row in evaluation if row not in shown]
    save_rows(train, "train.jsonl")
    save_rows(evaluation, "eval.jsonl")
    print(f"{len(all_intents)} intents, {len(words)} words, {len(train)} train and {len(evaluation)} eval rows")
    if a.rows_only:
        return
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file
    rng = random.Random(0)
    names = Names(words, rng, 0.4)
    docs = [document(all_intents, names) for _ in range(a.documents)]
    tok = tokenizer(docs[:40_000], os.path.join(a.model, "tokenizer.json"))
    data = packed(tok, docs)
    print(f"{len(docs)} documents, {data.shape[1]} rows of {LENGTH}, {(data[1] > 0).mean():.0%} filled", flush=True)
    config = json.load(open(os.path.join(HERE, "model", "config.json")))
    w = pretrain(initial(config, np.random.default_rng(0)), config, data, a.steps)
    w = {k: np.asarray(x).astype(ml_dtypes.bfloat16) for k, x in w.items()}
    save_file(w, os.path.join(a.model, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
