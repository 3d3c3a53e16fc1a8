"""Writes the committed preference cases: a tiny random model (weights that bf16 represents exactly) with a tokenizer and a chat template,
an initial PEFT adapter, rows, and for each loss what TRL's own trainer makes of them. Also tokens and boundaries of rows of several forms.

usage: make_preference.py OUT      (tests/golden/preference was made with torch 2.15.0, transformers 5.23.0, peft 0.21.2, trl 1.16.0)
"""
import json, math, os, random, sys, tempfile
os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_DISABLE_PROGRESS_BARS='1', TRL_EXPERIMENTAL_SILENCE='1')
import datasets, peft, torch, transformers, trl
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, PrinterCallback
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

STEPS, BATCH, RANK, ALPHA, LR, WARMUP, CLIP = 5, 4, 4, 8, 3e-3, 2, 1.0
# name: (options of finetune, trainer, config, settings, rows, reference)
CASES = {}
def dpo(name, options, reference='base', rows='pairs', **settings): CASES[name] = (options, trl.DPOTrainer, trl.DPOConfig, settings, rows, reference)
dpo('sigmoid', '--task dpo', loss_type='sigmoid')
dpo('reference', '--task dpo --beta 0.3 --reference-adapter ADAPTER', 'adapter', loss_type='sigmoid', beta=0.3)
dpo('cut', '--task dpo --max-seq-len 20', loss_type='sigmoid', max_length=20)
dpo('nll', '--task dpo --nll-weight 0.5', loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.5])
dpo('hinge', '--task dpo --loss hinge', loss_type='hinge')
dpo('ipo', '--task ipo', loss_type='ipo')
dpo('robust', '--task dpo --loss robust --label-smoothing 0.2', loss_type='robust', label_smoothing=0.2)
dpo('apo_zero', '--task dpo --loss apo_zero', loss_type='apo_zero')
dpo('apo_down', '--task dpo --loss apo_down', loss_type='apo_down')
CASES['apo_zero_unpaired'] = ('--task dpo --loss apo_zero_unpaired', trl.KTOTrainer, trl.KTOConfig, dict(loss_type='apo_zero_unpaired'), 'unpaired', 'base')
CASES['orpo'] = ('--task orpo', ORPOTrainer, ORPOConfig, {}, 'pairs', None)
for name, options, settings in [
        ('simpo', '--task simpo --beta 2 --simpo-gamma 1', dict(loss_type='simpo', cpo_alpha=0.0, beta=2.0, simpo_gamma=1.0)),
        ('cpo', '--task cpo --label-smoothing 0.1', dict(loss_type='sigmoid', label_smoothing=0.1)),
        ('cpo_hinge', '--task cpo --loss hinge', dict(loss_type='hinge')), ('cpo_ipo', '--task cpo --loss ipo', dict(loss_type='ipo'))]:
    CASES[name] = (options, CPOTrainer, CPOConfig, settings, 'pairs', None)
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TARGETS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
WORDS = 'the a gpu worker gradient step loss shard token model adapter rank sum mean over slow fast card'.split()

def sentence(n): return ' '.join(random.choice(WORDS) for _ in range(n)).capitalize() + random.choice('.!?') + f' {random.randint(0, 99)}'

def tokenizer(out):
    tok = Tokenizer(models.BPE()); tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator([sentence(12) for _ in range(200)], trainers.BpeTrainer(
        vocab_size=320, special_tokens=['<|end|>', '<|pad|>', '<|im_start|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token='<|end|>', pad_token='<|pad|>', chat_template=TEMPLATE)
    fast.save_pretrained(out); return fast

def model(out, vocab):
    config = LlamaConfig(vocab_size=vocab, hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                         max_position_embeddings=256, rms_norm_eps=1e-6, eos_token_id=0, pad_token_id=1, bos_token_id=None, tie_word_embeddings=False)
    m = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, w in m.named_parameters():
        if 'norm' in key: torch.nn.init.normal_(w, mean=1.0, std=0.1)
        elif 'embed' not in key: torch.nn.init.normal_(w, std=1.2 / math.sqrt(w.shape[1]))
    m.to(torch.bfloat16).save_pretrained(out)

def train(out, ft, rows, case):
    _, Trainer, Config, settings, _, reference = case
    base = AutoModelForCausalLM.from_pretrained(f'{out}/model', dtype=torch.float32, attn_implementation='eager')
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, task_type='CAUSAL_LM')
    if reference == 'adapter': m, lora = peft.PeftModel.from_pretrained(base, f'{out}/adapter_init', is_trainable=True), None
    else: m = base
    with tempfile.TemporaryDirectory() as scratch:
        args = Config(scratch, seed=1, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=1, train_sampling_strategy='sequential',
                      learning_rate=LR, lr_scheduler_type='cosine', warmup_steps=WARMUP, max_grad_norm=CLIP, optim='adamw_torch', weight_decay=0.0, use_cpu=True,
                      bf16=False, fp16=False, gradient_checkpointing=False, disable_dropout=True, logging_steps=1, report_to=[], save_strategy='no',
                      disable_tqdm=True, **settings)
        t = Trainer(model=m, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=ft, peft_config=lora)
        if lora: set_peft_model_state_dict(t.model, load_peft_weights(f'{out}/adapter_init'))
        t.remove_callback(PrinterCallback); t.train()
    names = dict(loss='loss', rewards_chosen='rewards/chosen', rewards_rejected='rewards/rejected', margin='rewards/margins', accuracy='rewards/accuracies',
                 logps_chosen='logps/chosen', logps_rejected='logps/rejected', grad_norm='grad_norm')
    return [{k: h[n] for k, n in names.items() if n in h} for h in t.state.log_history if 'loss' in h], args.beta

def forms(out, ft):
    """Rows of several forms with the ids of TRL's DPOTrainer."""
    user, said = lambda text: dict(role='user', content=text), lambda text: dict(role='assistant', content=text)
    groups = [
        [dict(prompt='The gpu:', chosen=' fast card', rejected=' slow card'), dict(prompt='The gradi', chosen='ent step', rejected='ation'),
         dict(prompt='Über ', chosen='das<|end|>', rejected='die'), dict(prompt='', chosen='mean', rejected='sum')],
        [dict(chosen='The model is fast', rejected='The model is slow'), dict(chosen='A step', rejected='A step over'), dict(chosen='the', rejected='the')],
        [dict(prompt=[user('Which card?')], chosen=[said('The fast card.')], rejected=[said('Slow.')]),
         dict(prompt=[user('a'), said('b'), user('c')], chosen=[said('d'), user('e'), said('f')], rejected=[said('g')])],
        [dict(chosen=[user('Which rank?'), said('Eight.')], rejected=[user('Which rank?'), said('None at all.')])]]
    found = []
    for rows in groups:
        base = AutoModelForCausalLM.from_pretrained(f'{out}/model', dtype=torch.float32)
        with tempfile.TemporaryDirectory() as scratch:
            args = trl.DPOConfig(scratch, max_length=None, use_cpu=True, bf16=False, report_to=[])
            t = trl.DPOTrainer(model=base, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=ft,
                               peft_config=LoraConfig(r=2, target_modules=TARGETS, task_type='CAUSAL_LM'))
        for row, ids in zip(rows, t.train_dataset):
            found.append(dict(row=row, **{k: ids[f'{k}_ids'] for k in ('prompt', 'chosen', 'rejected')}))
    return found

def main(out):
    torch.manual_seed(5); random.seed(5); torch.set_num_threads(2); os.makedirs(out, exist_ok=True)
    ft = tokenizer(f'{out}/model'); model(f'{out}/model', len(ft))
    base = AutoModelForCausalLM.from_pretrained(f'{out}/model', dtype=torch.float32)
    m = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type='CAUSAL_LM'))
    for key, w in m.named_parameters():
        if 'lora_B' in key: torch.nn.init.normal_(w, std=0.05)
    m.save_pretrained(f'{out}/adapter_init'); os.remove(f'{out}/adapter_init/README.md')
    # A prompt ends with a colon and a completion begins with a space: no token spans the boundary, so that all trainers agree.
    pairs = [dict(prompt=sentence(random.randint(1, 7)) + ':', chosen=' ' + sentence(random.randint(1, 9)), rejected=' ' + sentence(random.randint(1, 9)))
             for _ in range(STEPS * BATCH)]
    # Every step has answers of both kinds: TRL reports 0 for a kind that a batch lacks.
    labels = [i % BATCH == 0 or (i % BATCH < 3 and random.random() < 0.5) for i in range(len(pairs))]
    rows = dict(pairs=pairs, unpaired=[dict(prompt=r['prompt'], completion=r['chosen' if l else 'rejected'], label=l) for r, l in zip(pairs, labels)])
    for name, all in rows.items():
        with open(f'{out}/{name}.jsonl', 'w') as f: f.writelines(json.dumps(r) + '\n' for r in all)
    cases = []
    for name, case in CASES.items():
        log, beta = train(out, ft, rows[case[4]], case)
        cases.append(dict(name=name, options=case[0], rows=case[4], beta=beta, log=log))
        print(name, [round(h['loss'], 4) for h in log])
    versions = dict(trl=trl.__version__, transformers=transformers.__version__, peft=peft.__version__, torch=torch.__version__)
    json.dump(dict(versions=versions, cases=cases), open(f'{out}/expected.json', 'w'), indent=1)
    json.dump(forms(out, ft), open(f'{out}/forms.json', 'w'), ensure_ascii=False)

if __name__ == '__main__': main(sys.argv[1])
