"""Writes cases.json: the output of transformers' apply_chat_template for many templates and conversations.

usage: make.py [more.jinja ...]   (pip: transformers, tokenizers, jinja2; further template files are added to the run)
The clock is fixed, so that templates with a date always give the same text.
A case that transformers refuses holds null: this program must refuse it too.
"""
import datetime, json, pathlib, sys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
import transformers.utils.chat_template_utils as utils

NOW = 1732190400  # 2024-11-21 12:00:00 UTC


class Stopped(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)


utils.datetime = Stopped
T = {}
T['chatml'] = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
T['smollm2'] = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
T['generation'] = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content | trim + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
T['generation whitespace'] = """{% for message in messages %}
  {% if message.role == 'assistant' %}
<a>
    {% generation %}

  text {{ message.content }}
  {% set x = 'inner' %}
    {% endgeneration %}
</a>{{ x }}
  {% else %}
<o>{%generation-%}  {{ message.role }}  {%-endgeneration-%}  </o>
  {% endif %}
{% endfor %}
"""
T['llama3'] = "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
T['llama3.2'] = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions. To call a function, please respond with JSON for a function call." }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- "Do not use variables.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{#- Custom tools are passed in a user message with some extra guidance #}
{%- if tools_in_user_message and not tools is none %}
    {#- Extract the first user message so we can plug it in here #}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- "with its proper arguments that best answers the given prompt.\n\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- "Do not use variables.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
T['llama2'] = "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
T['mistral v0.3'] = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""
QWEN_TOOLS = r"""    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
"""
T['qwen2.5'] = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
""" + QWEN_TOOLS + r"""{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
T['qwen3'] = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
""" + QWEN_TOOLS.replace(r'"\n\n# Tools', '"# Tools') + r"""{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
T['zephyr'] = "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
T['phi3'] = "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
T['deepseek'] = "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
T['gemma'] = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
T['macro'] = r"""{%- macro show(message, tag='m') -%}
    <{{ tag }} {{ message.role | upper }}>{{ message.content | replace('a', 'A') }}</{{ tag }}>
{%- endmacro -%}
{%- for message in messages -%}
    {%- if loop.index > 3 %}{% break %}{% endif -%}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    {{ show(message) }}{{ show(message, tag='n') }}
    {%- if not loop.last %} | {{ loop.nextitem.role if loop.nextitem is defined }}{% endif %}
{%- endfor %}
"""
# values as Python prints them, methods and filters that templates use
T['python'] = r"""{{ none }} {{ true }} {{ 1.0 }} {{ 1e20 }} {{ 0.00001 }} {{ 2 ** 70 if false else 3 // 2 }} {{ 7 / 2 }} {{ [1, 'a', "it's", none, true] }} {{ {'k': 'v', 'n': [1.5]} }}
{{ messages[0] }}
{{ messages[-1].content | string | length }} {{ messages | map(attribute='role') | join(',') }} {{ messages | length }}
{{ {'a': 1, 'b': [1, 2], 'c': {}, 'd': [], 'e': "<&>'\"\u00e9\n", 'f': 1.0, 'g': none} | tojson }}
{{ {'b': 1, 'a': [1, {'z': 1, 'y': 2.5e-7}]} | tojson(indent=2) }}
{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ 'é' | tojson(ensure_ascii=true) }} {{ 'é😀' | tojson }}
{{ '  x '.strip() }}|{{ 'xxyxx'.lstrip('x') }}|{{ 'a,b,,c'.split(',') }}|{{ 'a b  c'.split() }}|{{ 'a-b-c'.split('-', 1) }}|{{ 'abc'[::-1] }}|{{ 'abc'[1:] }}|{{ 'abc'[-1] }}
{{ 'Hello World'.replace('o', '0') }}|{{ 'hello'.upper() }}|{{ 'hello world'.title() }}|{{ 'x'.startswith('x') }}|{{ 'abc'.find('c') }}|{{ 'a\nb'.splitlines() }}|{{ 'pre-x'.removeprefix('pre-') }}|{{ 'hello'.capitalize() }}
{{ 'a' in 'abc' }} {{ 'k' in {'k': 1} }} {{ 'x' not in ['y'] }} {{ 1 if undefined_name else 2 }} {{ undefined_name }}|{{ undefined_name is defined }}|{{ undefined_name | default('d') }}
{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}={{ v }};{% endfor %} {{ {'x': 1}.get('x') }} {{ {'x': 1}.get('y') }} {{ {'x': 1}.get('y', 5) }} {{ {'x': 1, 'y': 2}.keys() | list }}
{% set ns = namespace(n=0, found=false) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} {{ ns.found }}
{{ 'a' ~ 1 ~ 'b' }} {{ "%s-%d" | format('x', 3) }} {{ [3, 1, 2] | sort }} {{ [1, 2, 3] | first }} {{ [1, 2, 3] | last }} {{ [[1, 2], [3]] | tojson }} {{ range(3) | list }} {{ [1] + [2] }} {{ {'a': 1} is mapping }} {{ 'a' is string }} {{ [] is iterable }} {{ 1 is number }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ (messages | rejectattr('role', 'equalto', 'user') | first).role }} {{ 'x' if messages[0].nothing is none else 'y' }} {{ ' a b '| trim }}{{ 'abc' | indent(2) }}
{%- set joined = [] %}{% for m in messages %}{% set joined = joined + [m.role] %}{% endfor %}{{ joined }}
{% for v in [none, true, 1, 1.5, 'a', [], {}, nothing, (1, 2)] %}{{ v is iterable }}{{ v is sequence }}{{ v is mapping }}{{ v is string }}{{ v is number }}{{ v is integer }}{{ v is float }}{{ v is boolean }}{{ v is none }}{{ v is defined }}{{ v is true }} {% endfor %}
{{ [3, 'a'] | tojson | safe }} {{ 'a' if 1.0 == 1 }}{{ [1] == [1] }}{{ 'ab' * 2 }}{{ -7 // 2 }}{{ -7 % 3 }}{{ 2 ** 3 }} {{ [1, 2, 3, 4][1:3] }}{{ [1, 2, 3][-1] }}{{ [1, 2, 3][::2] }} {{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': 1} | items | list }} {{ 'a,b' | replace(',', ';') | upper }} {{ ['a', 'b'] | map('upper') | join('-') }} {{ [1, 2] | reverse | list }} {{ 'x' | capitalize }} {{ ' a ' | length }} {{ [[1, 'x']] | list }} {{ 3.7 | int }} {{ '5' | int + 1 }} {{ 2.5 | round }} {{ [1, none, 2] | select | list }} {{ ['a', 'a', 'b'] | unique | list }} {{ 'Größe' | upper }} {{ 'a\tb' | tojson }}
{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex0 }}{{ loop.cycle('x', 'y') }}{{ loop.previtem if loop.previtem is defined }}{% else %}none{% endfor %}{% for a in [] %}x{% else %}empty{% endfor %}
{% set block %} captured {{ 1 }} {% endset %}[{{ block | trim }}] {% filter upper %}shout{% endfilter %} {% raw %}{{ raw }}{% endraw %} {{ "a" "b" if false else 'c' }} {{ messages[0]["content"][:3] if messages[0].content is string }} {{ not true or false and true }} {{ 1 < 2 <= 2 }}
  {# a comment #}
   end {{- '  trimmed' -}}   
"""

TOOLS = [{'type': 'function', 'function': {'name': 'get_weather', 'description': "What's the weather <here> & \"there\"?",
          'parameters': {'type': 'object', 'properties': {'city': {'type': 'string', 'description': 'Ort, z. B. Zürich'},
                         'days': {'type': 'integer', 'enum': [1, 2.5, 1e-7, None, True]}}, 'required': ['city'], 'empty': {}, 'none': []}}},
         {'type': 'function', 'function': {'name': 'stop', 'description': '', 'parameters': {}}}]


def m(role, content, **more):
    return dict(role=role, content=content, **more)


CALL = [{'id': 'abcdefghi', 'type': 'function', 'function': {'name': 'get_weather', 'arguments': {'city': 'Zürich "Nord"', 'days': 2}}}]
C = {
    'one turn': dict(messages=[m('user', 'What is 2+2?'), m('assistant', '4')]),
    'system': dict(messages=[m('system', 'You are terse.\nVery.'), m('user', 'Hi'), m('assistant', 'Hello!')]),
    'turns': dict(messages=[m('user', 'a'), m('assistant', 'b'), m('user', 'c'), m('assistant', 'd'), m('user', 'e'), m('assistant', 'f')]),
    'unicode': dict(messages=[m('user', 'Grüße, 世界! 👩‍👩‍👧 \u202eمرحبا'), m('assistant', 'naïve – “quotes” … \u00a0end')]),
    'quotes': dict(messages=[m('user', "it's \"so\" <b>&amp; {{ not }} {% jinja %} \\n \\"), m('assistant', "```py\nprint('<|im_end|>')\n```")]),
    'white space': dict(messages=[m('system', ''), m('user', '  \n lead and trail \n\n'), m('assistant', ' \tx\n')]),
    'empty': dict(messages=[m('user', ''), m('assistant', '')]),
    'thinking': dict(messages=[m('user', 'q1'), m('assistant', '<think>\nhm\n</think>\n\na1'), m('user', 'q2'), m('assistant', 'a2', reasoning_content='because\nof that')]),
    'user last': dict(messages=[m('system', 's'), m('user', 'u')]),
    'not alternating': dict(messages=[m('user', 'a'), m('user', 'b'), m('assistant', 'c')]),
    'tools': dict(messages=[m('system', 'Use tools.'), m('user', 'Weather?'), m('assistant', '', tool_calls=CALL), m('tool', '{"t": 21.5}', tool_call_id='abcdefghi'), m('assistant', 'It is 21.5.')], tools=TOOLS),
    'two calls': dict(messages=[m('user', 'Weather?'), m('assistant', 'Let me see.', tool_calls=CALL + CALL), m('tool', 'a', tool_call_id='abcdefghi'), m('tool', 'b', tool_call_id='abcdefghi'), m('assistant', 'Fine.')], tools=TOOLS),
    'null content': dict(messages=[m('user', 'Weather?'), m('assistant', None, tool_calls=CALL)], tools=TOOLS[:1]),
}


def main():
    here = pathlib.Path(__file__).parent
    out = here / 'cases.json'
    for path in sys.argv[1:]:
        T[pathlib.Path(path).name] = pathlib.Path(path).read_text()
        out = pathlib.Path('cases.json')
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({'<s>': 0, '</s>': 1}, unk_token='</s>')), bos_token='<s>', eos_token='</s>')
    cases = []
    for t, template in T.items():
        tokenizer.chat_template = template
        for c, talk in C.items():
            for prompt in [False, True]:
                text = blocks = None
                try:
                    text = tokenizer.apply_chat_template(talk['messages'], tools=talk.get('tools'), tokenize=False, add_generation_prompt=prompt)
                    if 'generation %}' in template or 'generation-%}' in template:
                        _, [blocks] = utils.render_jinja_template([[{k: v for k, v in x.items() if v is not None} for x in talk['messages']]], tools=talk.get('tools'), chat_template=template, return_assistant_tokens_mask=True, add_generation_prompt=prompt, **tokenizer.special_tokens_map)
                        blocks = [list(b) for b in blocks]
                except Exception as e:
                    print(f'{t} / {c}: {type(e).__name__}: {e}', file=sys.stderr)
                cases.append(dict(template=t, conversation=c, prompt=prompt, text=text, blocks=blocks))
    out.write_text(json.dumps(dict(now=NOW, templates=T, conversations=C, cases=cases), ensure_ascii=False, indent=1) + '\n')
    print(out, len(cases), 'cases,', sum(c['text'] is None for c in cases), 'refused')


main()
