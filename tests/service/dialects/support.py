"""Models with chat templates, and helpers for tests of dialects."""

from __future__ import annotations

from typing import Any

from service.core.chat_template import ChatTemplate
from service.core.model_registry import ServedModel
from tests.service.support import App, byte_tokenizer, make_app, served

# In the style of those that published models have; the words are ours.
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

STYLES = {"turns": TURNS, "brackets": BRACKETS, "lines": LINES}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def talker(source: str = TURNS, name: str = "chat") -> ServedModel:
    """A decoder-only model with this template and a context of its own."""
    plain = served(name, "decoder-only", byte_tokenizer())
    return ServedModel(name, plain.checkpoint, plain.tokenizer, chat=ChatTemplate(source, TOKENS))


def chat_app(source: str = TURNS, **options: Any) -> App:
    """The usual models and `chat`."""
    return make_app(talker(source), **options)
