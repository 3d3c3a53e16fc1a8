"""Adds the cases of token classification to a folder of make_heads.py: rows of words, an initial PEFT adapter whose head has a bias, and what
transformers' Trainer makes of them: loss, gradient norm, the final adapters, and the probabilities of each word's classes.

The dropout in front of the head (`classifier_dropout`) is 0. Words are tokenised as in transformers' run_ner.py.

usage: make_tokens.py OUT [SEED]      (tests/golden/heads was made with torch 2.15.0, transformers 5.24.0, peft 0.21.2, SEED 5)
"""
import json, os, random, sys, tempfile
os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_DISABLE_PROGRESS_BARS='1')
import datasets, peft, torch, transformers
from make_heads import ALPHA, BATCH, CLIP, LR, RANK, STEPS, WARMUP, unnamed
from make_preference import TARGETS
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import (AutoConfig, AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification, PrinterCallback,
                          Trainer, TrainingArguments)

NAMES = ['B-CARD', 'B-STEP', 'I-CARD', 'I-STEP', 'O']  # sorted, as run_ner.py sorts them
TASK = '--task token-classification'
# name: (options of finetune, rows, settings of the trainer, longest row, class weights, ratio of LoRA+)
CASES = {
    'tags': (TASK, 'names', {}, 256, None, None),
    'decay': (f'{TASK} --weight-decay 0.5 --adam-epsilon 1e-3', 'names', dict(weight_decay=0.5, adam_epsilon=1e-3), 256, None, None),
    'cutwords': (f'{TASK} --max-seq-len 9', 'names', {}, 9, None, None),
    'weighted': (f'{TASK} --num-classes 5 --class-weights 1,0.5,2,1.5,0.25', 'integers', {}, 256, [1, 0.5, 2, 1.5, 0.25], None),
    'tagsplus': (f'{TASK} --loraplus-lr-ratio 4', 'names', {}, 256, None, 4.0)}
WORDS = ['the', 'gpu', 'worker', 'Gradient', 'step', 'loss', 'shard', 'token', 'model', 'über', '17', 'slow.', '日本', 'a', '-', '(fast)', '']


def headed(out):
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(f'{out}/model', num_labels=len(NAMES))
    config.classifier_dropout = 0.0
    return AutoModelForTokenClassification.from_pretrained(f'{out}/model', config=config, dtype=torch.float32, attn_implementation='eager')


def adapter(out):
    m = get_peft_model(headed(out), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, task_type='TOKEN_CLS'))
    for key, w in m.named_parameters():
        if 'lora_B' in key: torch.nn.init.normal_(w, std=0.05)
        if 'score.modules_to_save' in key: torch.nn.init.normal_(w, std=0.3)
    m.save_pretrained(f'{out}/init-tokens'); unnamed(f'{out}/init-tokens')


def row():
    words = ['worker'] + [random.choice(WORDS) for _ in range(random.randint(1, 9))]
    tags, inside = [], None
    for _ in words:
        inside = inside if inside and random.random() < 0.5 else None
        if inside: tags.append('I-' + inside)
        elif random.random() < 0.4:
            inside = random.choice(['CARD', 'STEP']); tags.append('B-' + inside)
        else: tags.append('O')
    return dict(tokens=words, tags=tags)


def encoded(ft, r, longest):
    tags = r.get('tags') or r['ner_tags']
    e = ft(r['tokens'], is_split_into_words=True, truncation=True, max_length=longest)
    labels, before = [], None
    for word in e.word_ids():
        first = word is not None and word != before
        labels.append((NAMES.index(tags[word]) if isinstance(tags[word], str) else tags[word]) if first else -100)
        before = word
    return dict(input_ids=e['input_ids'], labels=labels)


class Weighted(Trainer):
    weights = None
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop('labels'); out = model(**inputs)
        loss = torch.nn.functional.cross_entropy(out.logits.view(-1, len(NAMES)), labels.view(-1), weight=torch.tensor(self.weights))
        return (loss, out) if return_outputs else loss


def train(out, ft, rows, name):
    options, which, settings, longest, weights, ratio = CASES[name]
    m = peft.PeftModel.from_pretrained(headed(out), f'{out}/init-tokens', is_trainable=True)
    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(output_dir=scratch, seed=1, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=1,
                                 train_sampling_strategy='sequential', learning_rate=LR, lr_scheduler_type='cosine', warmup_steps=WARMUP,
                                 max_grad_norm=CLIP, optim='adamw_torch', use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
                                 logging_steps=1, report_to=[], save_strategy='no', disable_tqdm=True, **settings)
        optimizers = (None, None)
        if ratio: optimizers = (create_loraplus_optimizer(m, torch.optim.AdamW, lr=LR, loraplus_lr_ratio=ratio), None)
        cls = Trainer if weights is None else Weighted
        t = cls(model=m, args=args, train_dataset=datasets.Dataset.from_list([encoded(ft, r, longest) for r in rows[which]]),
                data_collator=DataCollatorForTokenClassification(ft), optimizers=optimizers)
        if weights: t.weights = weights
        t.remove_callback(PrinterCallback); t.train()
    m.save_pretrained(f'{out}/{name}'); unnamed(f'{out}/{name}')
    again = peft.PeftModel.from_pretrained(headed(out), f'{out}/{name}').eval()
    probabilities = []
    for r in rows[which][:8]:
        e = encoded(ft, r, 256)
        with torch.no_grad(): p = again(torch.tensor([e['input_ids']])).logits[0].softmax(-1)
        words = ft(r['tokens'], is_split_into_words=True).word_ids()
        starts = [i for i, w in enumerate(words) if w is not None and (i == 0 or words[i - 1] != w)]
        probabilities.append([[words[i], p[i].tolist()] for i in starts])
    log = [{k: h[k] for k in ('loss', 'grad_norm')} for h in t.state.log_history if 'loss' in h]
    return dict(name=name, options=options, rows=which, outputs='tokens', log=log, probabilities=probabilities)


def main(out, seed):
    torch.manual_seed(seed); random.seed(seed); torch.set_num_threads(2)
    ft = AutoTokenizer.from_pretrained(f'{out}/model')
    names = [row() for _ in range(STEPS * BATCH)]
    integers = [dict(tokens=r['tokens'], ner_tags=[-100 if random.random() < 0.2 and i else NAMES.index(t) for i, t in enumerate(r['tags'])])
                for r in names]
    adapter(out)
    rows = dict(names=names, integers=integers)
    for name, all in rows.items():
        with open(f'{out}/{name}.jsonl', 'w') as f: f.writelines(json.dumps(r) + '\n' for r in all)
    cases = []
    for name in CASES:
        cases.append(train(out, ft, rows, name))
        print(name, [round(h['loss'], 4) for h in cases[-1]['log']])
    versions = dict(transformers=transformers.__version__, peft=peft.__version__, torch=torch.__version__)
    json.dump(dict(versions=versions, names=NAMES, cases=cases), open(f'{out}/tokens.json', 'w'), indent=1)


if __name__ == '__main__': main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
