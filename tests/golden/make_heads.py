"""Writes the committed cases of heads whose outputs are numbers: a tiny random model (weights that bf16 represents exactly) with a tokenizer,
rows, initial PEFT adapters with heads, and what transformers' Trainer (regression) and TRL's RewardTrainer make of them: loss, gradient norm,
rewards, the final adapter, and its outputs for some texts.

usage: make_heads.py OUT [SEED]      (tests/golden/heads was made with torch 2.15.0, transformers 5.24.0, peft 0.21.2, trl 1.16.0, SEED 5)
"""
import json, math, os, random, shutil, sys, tempfile
os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_DISABLE_PROGRESS_BARS='1', TRL_EXPERIMENTAL_SILENCE='1')
import datasets, peft, torch, transformers, trl
from peft import LoraConfig, get_peft_model
from make_preference import TARGETS, sentence, tokenizer
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, DataCollatorWithPadding, PrinterCallback,
                          Qwen3Config, Trainer, TrainingArguments)

STEPS, BATCH, RANK, ALPHA, LR, WARMUP, CLIP = 5, 4, 4, 8, 3e-3, 2, 1.0
# name: (options of finetune, rows, number of outputs, settings of the trainer)
CASES = {
    'regression': ('--task regression', 'numbers', 1, {}),
    'several': ('--task regression', 'vectors', 3, {}),
    'reward': ('--task reward', 'pairs', 1, {}),
    'centred': ('--task reward --center-rewards-coefficient 0.05', 'pairs', 1, dict(center_rewards_coefficient=0.05)),
    'margins': ('--task reward', 'margins', 1, {}),
    'dropped': ('--task reward --max-seq-len 34 --long-rows drop', 'long', 1, dict(max_length=34)),
    'turns': ('--task reward', 'turns', 1, {})}
TEXTS = ['The gpu is fast.', 'a', 'Gradient over the mean of a shard 17', 'Slow slow slow slow card card card!']


def base(out, vocab):
    config = Qwen3Config(vocab_size=vocab, hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                         head_dim=10, max_position_embeddings=256, rms_norm_eps=1e-6, eos_token_id=0, pad_token_id=1, bos_token_id=None,
                         tie_word_embeddings=True)
    m = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, w in m.named_parameters():
        if 'norm' in key: torch.nn.init.normal_(w, mean=1.0, std=0.1)
        elif 'embed' not in key: torch.nn.init.normal_(w, std=1.2 / math.sqrt(w.shape[1]))
    m.config.classifier_dropout = 0.0
    m.to(torch.bfloat16).save_pretrained(out)
    os.remove(f'{out}/generation_config.json')


def headed(out, outputs):
    torch.manual_seed(outputs)
    return AutoModelForSequenceClassification.from_pretrained(f'{out}/model', num_labels=outputs, problem_type='regression',
                                                             dtype=torch.float32, attn_implementation='eager')


def unnamed(folder):
    """Leaves out the path of the base, which is that of this machine."""
    os.remove(f'{folder}/README.md')
    with open(f'{folder}/adapter_config.json') as f: config = json.load(f)
    with open(f'{folder}/adapter_config.json', 'w') as f: json.dump(dict(config, base_model_name_or_path=None), f, indent=1, sort_keys=True)


def adapter(out, outputs):
    m = get_peft_model(headed(out, outputs), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, task_type='SEQ_CLS'))
    for key, w in m.named_parameters():
        if 'lora_B' in key: torch.nn.init.normal_(w, std=0.05)
        if 'score.modules_to_save' in key: torch.nn.init.normal_(w, std=0.3)
    m.save_pretrained(f'{out}/init-{outputs}'); unnamed(f'{out}/init-{outputs}')


def all_rows():
    n = STEPS * BATCH
    numbers = [dict(text=sentence(random.randint(1, 12)), label=round(random.uniform(-2, 2), 3)) for _ in range(n)]
    vectors = [dict(text=r['text'], label=[r['label'], round(random.uniform(-1, 1), 3), random.choice([0, 1])]) for r in numbers]
    # A prompt ends with a colon and a completion begins with a space: no token spans the boundary.
    pair = lambda longest: dict(prompt=sentence(random.randint(1, longest)) + ':', chosen=' ' + sentence(random.randint(1, longest)),
                                rejected=' ' + sentence(random.randint(1, longest)))
    pairs = [pair(9) for _ in range(n)]
    margins = [dict(pair(7), margin=round(random.uniform(-0.5, 1.5), 3)) for _ in range(n)]
    turn = lambda role, text: dict(role=role, content=text.strip())
    turns = [dict(prompt=[turn('user', r['prompt'])], chosen=[turn('assistant', r['chosen'])], rejected=[turn('assistant', r['rejected'])]) for r in pairs]
    return dict(numbers=numbers, vectors=vectors, pairs=pairs, margins=margins, long=[pair(9) for _ in range(3 * n)], turns=turns)


def train(out, ft, rows, name):
    _, _, outputs, settings = CASES[name]
    m = peft.PeftModel.from_pretrained(headed(out, outputs), f'{out}/init-{outputs}', is_trainable=True)
    reward = CASES[name][0].startswith('--task reward')
    with tempfile.TemporaryDirectory() as scratch:
        common = dict(output_dir=scratch, seed=1, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=1,
                      train_sampling_strategy='sequential', learning_rate=LR, lr_scheduler_type='cosine', warmup_steps=WARMUP, max_grad_norm=CLIP,
                      optim='adamw_torch', weight_decay=0.0, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, logging_steps=1,
                      report_to=[], save_strategy='no', disable_tqdm=True)
        if reward:
            t = trl.RewardTrainer(model=m, args=trl.RewardConfig(**common, **settings), train_dataset=datasets.Dataset.from_list(rows), processing_class=ft)
        else:
            encoded = [dict(input_ids=ft(r['text']).input_ids, labels=[float(v) for v in r['label']] if outputs > 1 else float(r['label'])) for r in rows]
            t = Trainer(model=m, args=TrainingArguments(**common), train_dataset=datasets.Dataset.from_list(encoded), data_collator=DataCollatorWithPadding(ft))
        t.remove_callback(PrinterCallback); t.train()
        used = len(t.train_dataset)
    m.save_pretrained(f'{out}/{name}'); unnamed(f'{out}/{name}')
    again = peft.PeftModel.from_pretrained(headed(out, outputs), f'{out}/{name}').eval()
    end = ft.eos_token if reward else ''
    with torch.no_grad(): scores = [again(**ft(text + end, return_tensors='pt')).logits[0].tolist() for text in TEXTS]
    keys = ['loss', 'grad_norm', 'accuracy', 'margin', 'mean_reward', 'min_reward', 'max_reward']
    log = [{k: h[k] for k in keys if k in h} for h in t.state.log_history if 'loss' in h]
    assert used >= STEPS * BATCH, used
    if name not in ('regression', 'several', 'reward'): shutil.rmtree(f'{out}/{name}')
    return dict(name=name, options=CASES[name][0], rows=CASES[name][1], outputs=outputs, used=used, log=log, texts=TEXTS, scores=scores)


def main(out, seed):
    torch.manual_seed(seed); random.seed(seed); torch.set_num_threads(2); os.makedirs(out, exist_ok=True)
    ft = tokenizer(f'{out}/model'); base(f'{out}/model', len(ft))
    rows = all_rows()
    for outputs in (1, 3): adapter(out, outputs)
    for name, all in rows.items():
        with open(f'{out}/{name}.jsonl', 'w') as f: f.writelines(json.dumps(r) + '\n' for r in all)
    cases = []
    for name in CASES:
        cases.append(train(out, ft, rows[CASES[name][1]], name))
        print(name, [round(h['loss'], 4) for h in cases[-1]['log']], cases[-1]['used'])
    versions = dict(trl=trl.__version__, transformers=transformers.__version__, peft=peft.__version__, torch=torch.__version__)
    json.dump(dict(versions=versions, cases=cases), open(f'{out}/expected.json', 'w'), indent=1)


if __name__ == '__main__': main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
