"""A training run by transformers + PEFT as the reference for ours: a real model, real rows, all settings fixed.

Rows (Alpaca fields) are written as prompt / completion with the prompt already rendered, so that both sides only
tokenize: tokens = tok(prompt) + tok(completion) + eos, the prompt masked; the loss is the mean over the completion
tokens of the step. Rows in file order, no shuffle; the initial adapter is written beside them.

usage: make_real_case.py MODEL_DIR TRAIN_JSONL EVAL_JSONL OUT [--steps 40] [--batch 8] [--lr 5e-4] [--eval-rows 64]
writes OUT/{train,eval}.jsonl, OUT/adapter_init, OUT/adapter_final, OUT/expected.json
needs: torch, transformers, peft (checked with 2.15.0, 5.23.0, 0.21.2); not part of CI
"""
import argparse, itertools, json, os, time

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


def rendered(path, count):
    with open(path, encoding="utf-8") as lines:
        for r in map(json.loads, itertools.islice(lines, count)):
            prompt = f"<|im_start|>user\n{r['instruction']}\n{r['input']}<|im_end|>\n<|im_start|>assistant\n"
            yield dict(prompt=prompt, completion=r["output"])


def write(path, rows):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def batch(tok, rows):
    pairs = [(tok(r["prompt"]).input_ids, tok(r["completion"]).input_ids + [tok.eos_token_id]) for r in rows]
    longest = max(len(p) + len(c) for p, c in pairs)
    ids = torch.full((len(pairs), longest), tok.pad_token_id)
    labels = torch.full_like(ids, -100)
    seen = torch.zeros_like(ids)
    for i, (p, c) in enumerate(pairs):
        n = len(p) + len(c)
        ids[i, :n], labels[i, len(p):n], seen[i, :n] = torch.tensor(p + c), torch.tensor(c), 1
    return ids, labels, seen


def loss_sum(model, ids, labels, seen):
    logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1].float()
    loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum", ignore_index=-100)
    return loss, int((labels[:, 1:] >= 0).sum())


def evaluate(model, tok, rows):
    total = count = 0
    with torch.no_grad():
        for at in range(0, len(rows), 8):
            loss, n = loss_sum(model, *batch(tok, rows[at:at + 8]))
            total, count = total + float(loss), count + n
    return total / count


def main():
    p = argparse.ArgumentParser()
    for name in ("model", "train", "eval", "out"):
        p.add_argument(name)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--eval-rows", type=int, default=64)
    a = p.parse_args()
    torch.manual_seed(11)
    tok = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.save_pretrained(f"{a.out}/adapter_init")
    train = list(rendered(a.train, a.steps * a.batch))
    held = list(rendered(a.eval, a.eval_rows))
    write(f"{a.out}/train.jsonl", train)
    write(f"{a.out}/eval.jsonl", held)

    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=a.lr, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 4, a.steps)
    before, log, began, tokens = evaluate(model, tok, held), [], time.time(), 0
    for step in range(a.steps):
        ids, labels, seen = batch(tok, train[step * a.batch:(step + 1) * a.batch])
        loss, n = loss_sum(model, ids, labels, seen)
        (loss / n).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(weights, 1.0))
        log.append(dict(step=step + 1, loss=float(loss.detach()) / n, grad_norm=norm, lr=optimizer.param_groups[0]["lr"], tokens=n))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += int(seen.sum())
        print(log[-1], flush=True)
    seconds = time.time() - began
    after = evaluate(model, tok, held)
    model.save_pretrained(f"{a.out}/adapter_final")
    expected = dict(eval_before=before, eval_after=after, train_seconds=seconds, real_tokens=tokens, steps=a.steps,
                    batch=a.batch, lr=a.lr, warmup_steps=4, rank=16, alpha=32, log=log)
    with open(f"{a.out}/expected.json", "w") as f:
        json.dump(expected, f, indent=1)
    print(f"eval {before:.6f} -> {after:.6f}, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
