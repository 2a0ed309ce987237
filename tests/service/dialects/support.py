"""Models with chat templates, and helpers for tests of dialects."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tests.service.support import App, byte_tokenizer, make_app, served
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.template_files import TemplateFiles
from triptych.service.chat.template_probe import probed_template
from triptych.service.core.models import ServedModel

# In the style of published templates, with our own words.
TURNS = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
BRACKETS = """
{%- if messages[0]['role'] == 'system' %}
    {%- set rules = '<<RULES>>' + messages[0]['content'] | trim + '<</RULES>> ' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set rules = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[ASK] ' + (rules if loop.first else '') + message['content'] | trim + ' [/ASK]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
LINES = """{% for message in messages %}
{% if message.role in ('system', 'user', 'tool') %}
<|{{ message.role }}|>
{{ message.content }}{{ eos_token }}
{% elif message.role == 'assistant' %}
<|assistant|>
{% if message.content %}{{ message.content }}{% endif %}
{% for call in message.tool_calls or [] %}
{{ call.function.name }} {{ call.function.arguments | tojson }}
{% endfor %}
{% generation %}{{ eos_token }}{% endgeneration %}
{% else %}
{% continue %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""

CALLS = """{%- if tools %}<|turn|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}
{%- for message in messages %}<|turn|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif effort is defined %}<think>
{{ effort }}: {% endif %}{% endif %}"""

HARMONY = """{{ tools }}{% for m in messages %}<|start|>{{ m.role }}
{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>{{ m.role }}{% endif %}
{%- for call in m.tool_calls or [] %} to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments | tojson }}<|call|>
{%- else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
MISTRAL = """{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_call_id }}
{%- if m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{% endfor %}"""

STYLES = {"turns": TURNS, "brackets": BRACKETS, "lines": LINES}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def talker(source: str = TURNS, name: str = "chat") -> ServedModel:
    """Return a decoder-only model with this template and its own context length."""
    plain = served(name, "decoder-only", byte_tokenizer())
    return ServedModel(name, plain.checkpoint, plain.tokenizer, chat=template(source))


@lru_cache
def template(source: str) -> ChatTemplate:
    return probed_template(TemplateFiles({"default": source}, TOKENS), "tests")


def says(app: App, text: str) -> None:
    """Make the models write this text and end."""
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    app.script.token_ids, app.script.end_id = (*ids, 256), 256


def calling_app(**options: Any) -> App:
    """Return an application with a model `chat` that writes reasoning and calls like Qwen, and has room for tools."""
    return make_app(talker(CALLS), **{"max_model_len": 8_192, **options})


def prompt_of(app: App, at: int = -1) -> str:
    """Return the prompt of a request that the engine received."""
    return byte_tokenizer().decode(app.client.submitted[at].prompt_token_ids, skip_special_tokens=False)


def chat_app(source: str = TURNS, **options: Any) -> App:
    """Return an application with the usual models and `chat`."""
    return make_app(talker(source), **options)
