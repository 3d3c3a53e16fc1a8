"""Makes demo/model, demo/train.jsonl and demo/eval.jsonl from two pinned public sources; see README.md for them.

Rule: the model never sees the fine-tuning task, nor any text of its rows. It is pre-trained on dictionary entries
and on manual pages (command -> description), part of them as ChatML turns; the rows ask for the opposite direction
(description -> command), so that what fine-tuning adds is visible.

usage: make_demo.py WORDNET_DIR FIG_ROWS OUT [--steps 900] [--threads 2]
  WORDNET_DIR  usr/share/wordnet of Debian's wordnet-base 3.0
  FIG_ROWS     what fig_rows.mjs makes of npm's @withfig/autocomplete 2.692.3
needs: torch, transformers, tokenizers
"""
import argparse, hashlib, json, math, os, random, re, time

TOOLS = ["cargo", "docker", "gh", "git", "kubectl", "npm"]
ROWS_PER_TOOL = 300
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def wordnet(directory):
    """(lemma, part of speech, gloss) of every synset."""
    for name in ("noun", "verb", "adj", "adv"):
        for line in open(os.path.join(directory, "data." + name), encoding="latin-1"):
            if line.startswith("  ") or " | " not in line:
                continue
            fields, gloss = line.rstrip().split(" | ", 1)
            lemma = re.sub(r"\(\w+\)$", "", fields.split()[4]).replace("_", " ")
            yield lemma, name, gloss.strip()


def key(row):
    return hashlib.sha256(f"{row['tool']}\n{row['task']}".encode()).hexdigest()


def fig(path):
    """Rows whose (tool, task) names exactly one command, in an order that the hash fixes."""
    commands = {}
    for line in open(path, encoding="utf-8"):
        r = json.loads(line)
        commands.setdefault((r["tool"], r["task"]), set()).add(r["command"])
    rows = [dict(tool=t, task=k, command=next(iter(c))) for (t, k), c in commands.items() if len(c) == 1]
    return sorted(rows, key=key)


def split(rows):
    """(train, eval, rest): ROWS_PER_TOOL rows of each of TOOLS, every tenth for eval; rest shares no text with them."""
    chosen = []
    for tool in TOOLS:
        plain = [r for r in rows if r["tool"] == tool and len(r["command"]) <= 50 and r["task"].isascii()]
        chosen += plain[:ROWS_PER_TOOL]
    chosen.sort(key=key)
    held_tasks = {r["task"].lower() for r in chosen}
    held_commands = {r["command"] for r in chosen}
    rest = [r for r in rows if r["task"].lower() not in held_tasks and r["command"] not in held_commands]
    evaluation = chosen[::10]
    asked = {r["task"].lower() for r in evaluation}
    train = [r for i, r in enumerate(chosen) if i % 10 and r["task"].lower() not in asked]
    return train, evaluation, rest


def alpaca(rows, path):
    with open(path, "w", encoding="utf-8") as f:
        for r in rows:
            row = dict(instruction=f"Write the {r['tool']} command for this task.", input=r["task"], output=r["command"])
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def turn(user, assistant):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"


def documents(words, rest, rng):
    out = []
    for lemma, pos, gloss in words:
        if rng.random() < 0.25:
            out.append(turn(f"What does {lemma} mean?", gloss))
        else:
            out.append(f"{lemma} ({pos}): {gloss}")
    by_tool = {}
    for r in rest:
        if rng.random() < 0.3:
            out.append(turn(f"What does this do?\n{r['command']}", r["task"]))
        else:
            by_tool.setdefault(r["tool"], []).append(r)
    for rows in by_tool.values():
        rows.sort(key=lambda r: r["command"])
        for i in range(0, len(rows), 4):
            out.append("\n".join(f"{r['command']}\n    {r['task']}" for r in rows[i:i + 4]))
    rng.shuffle(out)
    return out


def tokenizer(docs, out):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator((d for d in docs), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   additional_special_tokens=["<|im_start|>"], model_max_length=512)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(out)
    return tok


def pretrain(model, data, steps, batch=32, length=256, peak=4e-3):
    import torch
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    opt = torch.optim.AdamW([dict(params=decay, weight_decay=0.1), dict(params=plain, weight_decay=0.0)], lr=peak, betas=(0.9, 0.95))
    gen = torch.Generator().manual_seed(1)
    begun, chunks = time.time(), len(data) // length
    table = data[:chunks * length].view(chunks, length)
    order = torch.randperm(chunks, generator=gen)
    at = 0
    for step in range(steps):
        if at + batch > chunks:
            order, at = torch.randperm(chunks, generator=gen), 0
        x = table[order[at:at + batch]]
        at += batch
        rate = peak * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * 0.6 * step / steps)) * min(1.0, 3 * (steps - step) / steps)
        for group in opt.param_groups:
            group["lr"] = rate
        logits = model(input_ids=x, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            took = time.time() - begun
            print(f"step {step} loss {float(loss.detach()):.3f} {took:.0f} s {(step + 1) * batch * length / took:.0f} tokens/s", flush=True)


def main():
    p = argparse.ArgumentParser()
    for name in ("wordnet", "fig_rows", "out"):
        p.add_argument(name)
    p.add_argument("--steps", type=int, default=900)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    torch.set_num_threads(a.threads)
    rng = random.Random(0)
    model_dir = os.path.join(a.out, "model")
    os.makedirs(model_dir, exist_ok=True)
    train, evaluation, rest = split(fig(a.fig_rows))
    alpaca(train, os.path.join(a.out, "train.jsonl"))
    alpaca(evaluation, os.path.join(a.out, "eval.jsonl"))
    docs = documents(list(wordnet(a.wordnet)), rest, rng)
    tok = tokenizer(docs, model_dir)
    ids = []
    for e in tok.encode_batch(docs, add_special_tokens=False):
        ids += e.ids + [0]
    data = torch.tensor(ids, dtype=torch.long)
    print(f"{len(train)} train, {len(evaluation)} eval rows; {len(docs)} documents, {sum(map(len, docs))} characters, {len(ids)} tokens")
    config = LlamaConfig(vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True,
                         rope_theta=10000.0, bos_token_id=None, eos_token_id=2, pad_token_id=0, dtype=torch.float32)
    model = LlamaForCausalLM(config)
    print(sum(w.numel() for w in model.parameters()), "parameters")
    pretrain(model, data, a.steps)
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(model_dir)


if __name__ == "__main__":
    main()
