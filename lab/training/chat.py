"""The chat template of `assistant`, and conversations as the texts that it makes of them.

Turns and calls have the marks that Qwen and Hermes use, so the service parts replies as theirs. Tools are a line each
instead of their JSON schema, which is long for so small a model.
"""

from __future__ import annotations

import json
from functools import lru_cache

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lab.training.conversations import Conversation
from lab.training.vocabulary import TURN_END

TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}
{% set function = tool.function %}
{{ function.name }}({{ function.parameters.properties | join(', ') }}): {{ function.description }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{% if not loop.first %}{{ '\\n' }}{% endif %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""


def rendered(conversation: Conversation) -> tuple[str, str]:
    """Return the prompt and the reply of a conversation, which ends with `<|im_end|>`."""
    template, messages = _template(), conversation.messages
    prompt = template.render(messages=messages[:-1], tools=conversation.tools, add_generation_prompt=True)
    whole = template.render(messages=messages, tools=conversation.tools, add_generation_prompt=False)
    assert whole.startswith(prompt) and whole.endswith(TURN_END + "\n")
    return prompt, whole[len(prompt) : -1]


@lru_cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)
