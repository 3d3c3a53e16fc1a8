"""Writes learn.json: which tokens TRL, LLaMA-Factory and Axolotl train on, for the values of --learn and marked messages.

usage: make_learn.py LLAMA_FACTORY AXOLOTL   (pip: trl, transformers, torch; the two arguments are folders of unpacked
wheels with colorama and addict, of which only the conversion of rows is imported)
TRL: the labels of SFTTrainer's data set. LLaMA-Factory: those of its SupervisedDatasetProcessor with the template
`chatml`, whose turns end with a line break after the end-of-turn token. This line break is trained on there and not
here: its mask is cleared. Axolotl: those of its ChatTemplateStrategy.
"""
import importlib.machinery, json, pathlib, sys, tempfile, types
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

here = pathlib.Path(__file__).parent
sys.path += sys.argv[1:3]


class Absent(types.ModuleType):
    """Stands for a package that the conversion of rows never calls."""
    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (), {})


for name in ['torchaudio', 'librosa', 'av', 'soundfile']:
    sys.modules[name] = Absent(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES

config = json.load(open(here / 'cases.json'))['config']['bytes']
fast = PreTrainedTokenizerFast(tokenizer_file=str(here / 'bytes.json'), eos_token='<|im_end|>', pad_token='<|endoftext|>')
fast.backend_tokenizer.no_truncation()
fast.backend_tokenizer.no_padding()
G, E = '{% generation %}', '{% endgeneration %}'
CHATML = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}" + G + "{{ message['content'] + '<|im_end|>' }}" + E + "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = CHATML.replace(G, '').replace(E, '')
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
cases = []


def m(role, content, **mark):
    return dict(role=role, content=content, **mark)


def case(by, learn, templates, row, ids, labels):
    mask = [int(label != -100) for label in labels]
    for template in templates:
        cases.append(dict(by=by, learn=learn, tokenizer='bytes', template=template, row=row, ids=ids, mask=mask))


TALKS = [
    [m('user', 'Which command prints lines?'), m('assistant', 'cat')],
    [m('system', 'Answer in one word.'), m('user', 'red?'), m('assistant', 'blue'), m('user', 'green'), m('assistant', 'Grüße, 世界!')],
    [m('user', 'the same'), m('assistant', 'the same'), m('user', 'the same'), m('assistant', 'the same')],
]


# A variable of the template removes the think block; the template begins with a line break, which is kept.
THINKING = "\n{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}" + G + "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}{% endif %}{{ message['content'] + (mark | default('')) + '<|im_end|>' }}" + E + "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
UNMARKED = THINKING.replace(G, '').replace(E, '')


def trl(row, learn, templates, **options):
    with tempfile.TemporaryDirectory() as folder:
        options = dict(output_dir=folder, report_to='none', use_cpu=True, bf16=False, max_length=None, **options)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast.backend_tokenizer, eos_token='<|im_end|>', pad_token='<|endoftext|>')
        tokenizer.chat_template = THINKING if 'chat_template_kwargs' in row else CHATML
        trainer = SFTTrainer(model, SFTConfig(**options), train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
        made = trainer.train_dataset[0]
    case('TRL', learn, templates, row, made['input_ids'], made['labels'])


def llama_factory(talk, learn, **options):
    args = types.SimpleNamespace(cutoff_len=1 << 20, mask_history=False, train_on_prompt=False, **{})
    vars(args).update(options)
    made = SupervisedDatasetProcessor(template=TEMPLATES['chatml'], tokenizer=fast, processor=None, data_args=args)
    system, turns = (talk[0]['content'], talk[1:]) if talk[0]['role'] == 'system' else ('', talk)
    ids, labels = made._encode_data_example(turns[:-1], turns[-1:], system, None, [], [], [])
    end, newline = fast.eos_token_id, fast('\n').input_ids
    text = fast.decode(ids)
    assert text == fast.apply_chat_template(talk, chat_template=PLAIN, tokenize=False), text
    if learn != 'all':
        labels = [-100 if i and [ids[i]] == newline and ids[i - 1] == end else label for i, label in enumerate(labels)]
    case('LLaMA-Factory', learn, [PLAIN, CHATML], dict(messages=talk), ids, labels)


def axolotl(talk, learn, **options):
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy
    prompter = ChatTemplatePrompter(fast, PLAIN, message_field_training='train')
    made = ChatTemplateStrategy(prompter, tokenizer=fast, train_on_inputs=False, sequence_len=1 << 20, train_on_eos='turn', **options)
    out = made.tokenize_prompt(dict(messages=talk))
    case('Axolotl', learn, [PLAIN, CHATML], dict(messages=talk), out['input_ids'], out['labels'])


for talk in TALKS:
    row = dict(messages=talk)
    trl(row, 'answers', [PLAIN, CHATML], assistant_only_loss=True)
    trl(row, 'all', [PLAIN, CHATML], assistant_only_loss=False)
    llama_factory(talk, 'answers')
    llama_factory(talk, 'last', mask_history=True)
    llama_factory(talk, 'all', train_on_prompt=True)
    axolotl(talk, 'answers', roles_to_train=['assistant'])
pair = dict(prompt='Question: red?\n', completion='blue')
trl(pair, 'answers', [None])
trl(pair, 'all', [None], completion_only_loss=False)
split = dict(prompt=TALKS[1][:2], completion=TALKS[1][2:])
trl(split, 'all', [PLAIN, CHATML], completion_only_loss=False)
for values in [dict(enable_thinking=False), dict(enable_thinking=True), dict(mark='"red\n', enable_thinking=False)]:
    talk = [m('user', 'red?'), m('assistant', 'blue', reasoning_content='one or two')]
    trl(dict(messages=talk, chat_template_kwargs=values), 'answers', [THINKING, UNMARKED], assistant_only_loss=True)
for marks in [(None, False, None, None), (None, False, None, True), (True, None, None, False), (None, None, True, None), (False, True, True, True)]:
    talk = [dict(turn) if mark is None else dict(turn, train=mark) for turn, mark in zip(TALKS[2], marks)]
    talk[0]['content'], talk[2]['content'] = 'one', 'three files'
    axolotl(talk, 'answers', roles_to_train=['assistant'])
    axolotl(talk, 'marked', roles_to_train=[])

(here / 'learn.json').write_text('{"config": ' + json.dumps(dict(bytes=config)) + ',\n"cases": [\n' + ',\n'.join(json.dumps(c, ensure_ascii=False) for c in cases) + '\n]}\n')
print(len(cases), 'cases')
