"""What a model can do in conversations, according to its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.model.errors import ConfigError
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.formats import AUTO, reasoning_format, tool_format
from triptych.service.chat.template_probe import read_chat_template


def chat_abilities(
    chat: ChatTemplate | None, problem: str, *, tools: str = AUTO, reasoning: str = AUTO
) -> dict[str, Any]:
    """Return the abilities that /info and `inspect` show; `tools` and `reasoning` are the service's format settings."""
    if chat is None:
        return {"serves": False, "problem": problem or "there is no chat template", "tools": None, "reasoning": None}
    for_tools = chat.chosen(with_tools=True)
    calls = tool_format(for_tools.traits, tools) if for_tools.reads("tools") else None
    thoughts = reasoning_format(chat.traits, reasoning)
    return {
        "serves": True,
        "problem": for_tools.traits.tools_problem if calls is None else "",
        "tools": calls.name if calls is not None else None if for_tools.reads("tools") else "json",
        "reasoning": None if thoughts is None else thoughts.name,
    }


def folder_abilities(folder: Path) -> dict[str, Any]:
    """Return the abilities of the model in a folder."""
    try:
        return chat_abilities(read_chat_template(folder), "")
    except ConfigError as error:
        return chat_abilities(None, str(error))
