"""Writes smollm2.json: transformers' ids and assistant masks of texts and conversations, with SmolLM2's own tokenizer and
template.

usage: make_smollm2.py DIRECTORY_OF_SMOLLM2   (pip: transformers, jinja2)
"""
import json, pathlib, sys
from transformers import AutoTokenizer

tok = AutoTokenizer.from_pretrained(sys.argv[1])
TEXTS = ['The capital of France is', '', ' \n\n\t x  ', "def f(x):\n    return x ** 2  # it's\n", 'Grüße, 世界! 👩‍👩‍👧 \u202eمرحبا', '<|im_start|>user\nhi<|im_end|>',
         '1234567890 3.14159 0x1F', 'a' * 300, '\u00a0\ufeff\u200b e\u0301', 'https://example.org/?q=1&r=2#x']


def m(*turns):
    return [dict(role=r, content=c) for r, c in zip(['user', 'assistant'] * len(turns), turns)]


TALKS = [m('What is 2+2?', '4'), m('a', 'b', 'c', 'd', 'e', ' f \n'), m('', ''), m('世界?', 'Grüße 👩‍👩‍👧\n\n', 'the same', 'the same'),
         [dict(role='system', content='Be terse.')] + m('Hi', 'Hello <|im_end|> there')]
MARKED = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
out = dict(texts=[dict(text=t, ids=tok(t).input_ids) for t in TEXTS], talks=[])
for talk in TALKS:
    plain = tok.apply_chat_template(talk, return_dict=True)
    marked = tok.apply_chat_template(talk, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True)
    assert plain['input_ids'] == marked['input_ids'], talk
    out['talks'].append(dict(messages=talk, ids=plain['input_ids'], mask=marked['assistant_masks']))
(pathlib.Path(__file__).parent / 'smollm2.json').write_text(json.dumps(out, ensure_ascii=False) + '\n')
