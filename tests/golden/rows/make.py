"""Writes two small tokenizers and cases.json: rows of every form, with transformers' ids and masks.

usage: make.py   (pip: transformers, tokenizers, jinja2)
`bytes` is a byte-level BPE (as GPT-2, Llama 3, Qwen), `pieces` a Metaspace BPE with byte fallback whose post-processor
puts a BOS in front (as Llama 2, Mistral v0.1).
Masks of conversations come from transformers' own `return_assistant_tokens_mask`, with a copy of each template that
has a generation block around the assistant's text: content and end-of-turn token.
"""
import json, pathlib, random
from tokenizers import Tokenizer, AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

here = pathlib.Path(__file__).parent
random.seed(7)
words = 'the a of to write command file list show all user system answer question which prints lines in folder name number red green blue one two three Grüße 世界 naïve instruction response below input output weather tool call'.split()
corpus = [' '.join(random.choice(words) for _ in range(random.randint(3, 20))).capitalize() + random.choice(['.', '!', '?', '\n', '\n\n', ': 42', " it's"]) for _ in range(800)]

b = Tokenizer(models.BPE())
b.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
b.decoder = decoders.ByteLevel()
b.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=448, special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
b.enable_truncation(8)       # saved into tokenizer.json, and ignored by readers
b.enable_padding(length=8)

p = Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True))
p.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
p.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
p.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=560, special_tokens=['<unk>', '<s>', '</s>'] + [f'<0x{i:02X}>' for i in range(256)]))
p.add_special_tokens(['<unk>', '<s>', '</s>'])
p.post_processor = processors.TemplateProcessing(single='<s> $A', pair='<s> $A <s> $B', special_tokens=[('<s>', 1)])

FILES = {'bytes': b, 'pieces': p}
CONFIG = {'bytes': dict(eos_token='<|im_end|>', pad_token={'content': '<|endoftext|>', 'special': True}, add_bos_token=True),
          'pieces': dict(bos_token={'content': '<s>', 'special': True}, eos_token='</s>', add_bos_token=False)}
for name, t in FILES.items():
    t.save(str(here / f'{name}.json'), pretty=False)
b.no_truncation(); b.no_padding()
FAST = {n: PreTrainedTokenizerFast(tokenizer_object=t, **{k: v['content'] if isinstance(v, dict) else v for k, v in CONFIG[n].items() if k.endswith('token') and k != 'add_bos_token'}) for n, t in FILES.items()}

G, E = '{% generation %}', '{% endgeneration %}'
MARKED = {
    'smollm2': "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}" + G + "{{ message['content'] + '<|im_end|>' }}" + E + "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    'instruct': "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}" + G + "{{ ' ' + message['content'] | trim + eos_token }}" + E + "{% endif %}{% endfor %}",
    'trimmed': "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n\n' }}" + G + "{{ message['content'] | trim + '<|im_end|>' }}" + E + "{% else %}{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}",
    # earlier turns lose their thinking, and only the newest turn keeps an empty one, as in Qwen3
    'thinking': "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}" + G + "{% set content = message['content'].split('</think>')[-1].lstrip('\n') %}{% if loop.index0 > ns.last and loop.last %}{{ '<think>\n' + message['content'].split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' if '</think>' in message['content'] else '<think>\n\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>' }}" + E + "{{ '\n' }}{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
PLAIN = {n: t.replace(G, '').replace(E, '') for n, t in MARKED.items()}
ON = {'smollm2': 'bytes', 'trimmed': 'bytes', 'thinking': 'bytes', 'instruct': 'pieces'}


def m(role, content):
    return dict(role=role, content=content)


TALKS = [
    [m('user', 'Which command prints lines?'), m('assistant', 'cat')],
    [m('user', 'one'), m('assistant', 'two'), m('user', 'three'), m('assistant', 'Grüße, 世界! \n'), m('user', ''), m('assistant', ' 👩‍👩‍👧 ')],
    [m('user', 'the same'), m('assistant', 'the same'), m('user', 'the same'), m('assistant', 'the same')],
    [m('user', 'x\n\n'), m('assistant', '\n\nlist\n\n')],
    [m('user', 'q'), m('assistant', '<think>\nred or blue\n</think>\n\nblue'), m('user', 'q'), m('assistant', '<think>\nwhich\n</think>\n\nred')],
    [m('user', 'only a question')],
]
SYSTEM = [m('system', 'Answer in one word.'), m('user', 'red?'), m('assistant', 'blue')]
TEXTS = ['Write the answer.', '', ' leading and trailing \n', 'Grüße, 世界! 👩‍👩‍👧', 'ends with its own end<|im_end|>', 'ends with its own end</s>', '<s>twice', "it's <|im_start|>user"]
PAIRS = [('Question: red?\n', 'blue'), ('', 'alone'), ('no answer', ''), ('the command', ' list'), ('Grüß', 'e 世界')]
PREAMBLE = 'Below is an instruction that describes a task'
cases = []


def case(tokenizer, template, row, ids, mask):
    assert len(ids) == len(mask)
    cases.append(dict(tokenizer=tokenizer, template=template, row=row, ids=ids, mask=[int(x) for x in mask]))


def talk(tokenizer, template, row, messages):
    fast = FAST[tokenizer]
    text = fast.apply_chat_template(messages, chat_template=PLAIN[template], tokenize=False)
    assert text == fast.apply_chat_template(messages, chat_template=MARKED[template], tokenize=False)
    out = fast.apply_chat_template(messages, chat_template=MARKED[template], return_assistant_tokens_mask=True, return_dict=True)
    assert out['input_ids'] == fast(text, add_special_tokens=False).input_ids
    for kind in [PLAIN, MARKED]:
        case(tokenizer, kind[template], row, out['input_ids'], out['assistant_masks'])


for name, fast in FAST.items():
    eos = fast.eos_token_id
    for text in TEXTS:
        ids = fast(text).input_ids
        ids += [] if ids and ids[-1] == eos else [eos]
        case(name, None, dict(text=text), ids, [1] * len(ids))
        if text:
            ids = fast(text).input_ids
            case(name, None, dict(text=text, label='a'), ids, [0] * len(ids))
    for prompt, completion in PAIRS:
        a, c = fast(prompt).input_ids, fast(completion, add_special_tokens=False).input_ids + [eos]
        case(name, None, dict(prompt=prompt, completion=completion), a + c, [0] * len(a) + [1] * len(c))
    for i, s in [('List files.', ''), ('Sort it.', 'b\na')]:
        prompt = PREAMBLE + (', paired with an input that provides further context' if s else '') + '. Write a response that appropriately completes the request.\n\n### Instruction:\n' + i + '\n\n' + (f'### Input:\n{s}\n\n' if s else '') + '### Response:\n'
        a, c = fast(prompt).input_ids, fast('ls', add_special_tokens=False).input_ids + [eos]
        case(name, None, dict(instruction=i, input=s, output='ls'), a + c, [0] * len(a) + [1] * len(c))
for template, name in ON.items():
    for t in TALKS + ([SYSTEM] if template != 'instruct' else []):
        talk(name, template, dict(messages=t), t)
    t = TALKS[1]
    share = [{'from': {'user': 'human', 'assistant': 'gpt'}[x['role']], 'value': x['content']} for x in t]
    talk(name, template, dict(conversations=share), t)
    talk(name, template, dict(instruction='red', input='green', output='blue'), [m('user', 'red\ngreen'), m('assistant', 'blue')])
    talk(name, template, dict(instruction='red', input='', output='blue', history=[['a', 'b']]), [m('user', 'a'), m('assistant', 'b'), m('user', 'red'), m('assistant', 'blue')])

(here / 'cases.json').write_text('{"config": ' + json.dumps(CONFIG) + ',\n"cases": [\n' + ',\n'.join(json.dumps(c, ensure_ascii=False) for c in cases) + '\n]}\n')
print(len(cases), 'cases')
