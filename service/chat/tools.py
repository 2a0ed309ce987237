"""The tools that a reply may call, in one form for all protocols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from triptych.service.chat.json_text import read_json
from triptych.service.core.errors import invalid, shorten

Json = dict[str, Any]
Choice = Literal["none", "auto", "required"]

NAME_PATTERN = r"^[A-Za-z0-9_.:\-]{1,128}$"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client that a reply can call; `param` is its place in the request body, for errors."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None  # a JSON schema; None: no parameters
    strict: bool = False
    param: str = "tools"

    @property
    def schema(self) -> Json:
        """The JSON schema of the arguments, which are always an object."""
        if not self.parameters:  # a function without parameters takes no arguments
            return {"type": "object", "properties": {}, "additionalProperties": False}
        schema = dict(self.parameters)
        return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}

    def shown(self) -> Json:
        """Return the tool as templates expect it, in OpenAI's form."""
        function: Json = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters) if self.parameters else {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


def called_arguments(text: str) -> object:
    """Return the JSON arguments of an earlier call as a value, or the text itself if it is not JSON.

    An empty text gives an empty object: some clients send it for no arguments.
    """
    if not text.strip():
        return {}
    try:
        return read_json(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and which of them the reply may or must call.

    With `required` the reply has at least one call. `only` names the tools that it may call; None: all.
    """

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    only: frozenset[str] | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the reply may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.only is None or tool.name in self.only)

    @property
    def is_held(self) -> bool:
        """Whether a grammar makes the calls match the schemas of their tools."""
        if not self.callable:
            return False
        return self.choice == "required" or self.only is not None or any(tool.strict for tool in self.callable)


def tool_use(tools: tuple[Tool, ...], choice: Choice | None, only: Iterable[str] | None, *, parallel: bool) -> ToolUse:
    """Return the checked use of tools.

    Raises `ApiError` for two tools of one name, for unknown names in `only`, and for arguments that are not an object.
    """
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise invalid(f"tools has two of the name {shorten(tool.name)}", "tools")
        names.add(tool.name)
        if (tool.parameters or {}).get("type", "object") != "object":
            raise invalid(f"{tool.param}.type must be object", f"{tool.param}.type")
    allowed = None if only is None else frozenset(only)
    for name in sorted((allowed or set()) - names):
        raise invalid(f"tool_choice: tools has none of the name {shorten(name)}", "tool_choice")
    if choice == "required" and not (tools if allowed is None else allowed):
        raise invalid("tool_choice: there are no tools to call", "tool_choice")
    return ToolUse(tools, choice or "auto", allowed, parallel)
