"""Finds how a chat template marks reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from triptych.service.chat.chat_template import SWITCHES, ChatTemplate, ReasoningMarks
from triptych.service.chat.formats import OWN, REASONING_FORMATS, ReasoningFormat, own_reasoning

_USER = {"role": "user", "content": "Question-3"}
_THOUGHT, _SAID = "Thought-9", "Answer-5"
_KEYS = ("reasoning_content", "reasoning", "thought")  # message keys from which templates read it
_HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")
_OPENING = re.compile(r"(<[^<>\s]{1,64}>|\[[^\[\]\n]{1,64}\])\s*$")
_CLOSING = re.compile(r"\s*(<[^<>\s]{1,64}>|\[[^\[\]\n]{1,64}\])")
_LAST_LINE = re.compile(r"([^\n<>\[\]]{8,64})$")


def without_reasoning(reply: str, format: ReasoningFormat | None) -> str:
    """Return a reply without its reasoning, or without the closing mark of reasoning that the prompt has opened."""
    if format is None or not format.closing:
        return reply
    text = reply.lstrip()
    if text.startswith(format.opening.strip()) and format.closing in text:
        return text.partition(format.closing)[2]
    return text.removeprefix(format.closing) if text.startswith(format.closing) else reply


class ReasoningProbe:
    """A search for the reasoning marks of one template; `render` returns the text of a conversation, or None."""

    def __init__(self, render: Callable[..., str | None], template: ChatTemplate) -> None:
        self._render = render
        self._switches = [name for name in SWITCHES if template.takes(name)]
        self._found: ReasoningFormat | None = None

    def traits(self) -> dict[str, Any]:
        """Return the traits of reasoning, and keep its format for `without`."""
        found = self._written() or self._in_prompts()
        name = found.get("reasoning_format", "")
        if marks := found.get("reasoning_marks"):
            self._found = own_reasoning(marks)
        elif name:
            self._found = REASONING_FORMATS[name]
        return found

    def without(self, reply: str) -> str:
        """Return a reply without its reasoning, or without the closing mark of reasoning that the prompt has opened."""
        return without_reasoning(reply, self._found)

    def _written(self) -> dict[str, Any]:
        """Return the marks that the template writes around the reasoning of a message."""
        prompt = self._render([_USER], speak=True) or ""
        for key in _KEYS:
            given = {"role": "assistant", "content": _SAID, key: _THOUGHT}
            if key == _KEYS[0]:
                given["thinking"] = _THOUGHT
            text = self._render([_USER, given])
            if text is None or _THOUGHT not in text:
                continue
            named = {} if key == _KEYS[0] else {"reasoning_key": key}
            before, _, after = text.partition(_THOUGHT)
            found = self._known(before, after) or self._own(before, after, prompt)
            if found:
                return found | named
        return {}

    def _known(self, before: str, after: str) -> dict[str, Any]:
        if before.endswith(_HARMONY[0]) and after.startswith(_HARMONY[1]):
            return {"reasoning_format": "harmony"}
        for format in REASONING_FORMATS.values():
            is_opened = before.rstrip().endswith(format.opening.strip())
            if format.closing and is_opened and after.lstrip().startswith(format.closing):
                return {"reasoning_format": format.name}
        return {}

    def _own(self, before: str, after: str, prompt: str) -> dict[str, Any]:
        closing = _CLOSING.match(after)
        opening = _OPENING.search(before)
        prompt = prompt.rstrip()
        if closing is None or _SAID not in after:
            return {}
        begun = "" if opening is None else prompt.rpartition(opening[1])[2]
        if opening is None or (opening[1] in prompt and begun and closing[1] not in begun):
            opening = _LAST_LINE.search(prompt)  # the prompt's last line opens the reasoning of every reply
        if opening is None:
            return {}
        marks = ReasoningMarks(opening[1], closing[1])
        texts = before.rpartition(_USER["content"])[2] + after
        if texts.count(marks.closing) > 1 or texts.count(marks.opening) > 1:
            return {}  # they also occur elsewhere
        return {"reasoning_format": OWN, "reasoning_marks": marks}

    def _in_prompts(self) -> dict[str, Any]:
        """Return the format whose marks the template writes into prompts or removes from earlier content."""
        switched = [{name: value} for name in self._switches for value in (True, False)]
        prompts = [self._render([_USER], speak=True, **more) or "" for more in ({}, *switched)]
        prompts.append(
            self._render([_USER, {"role": "assistant", "content": _SAID}]) or ""
        )  # with marks around nothing
        for format in REASONING_FORMATS.values():
            opening, closing = format.opening.strip(), format.closing
            if not closing:
                continue
            if any(
                prompt.rstrip().endswith(opening) or (opening in prompt and closing in prompt) for prompt in prompts
            ):
                return {"reasoning_format": format.name}
            content = f"{format.opening}\n{_THOUGHT}\n{closing}\n\n{_SAID}"
            said = [{"role": "assistant", "content": one} for one in (content, _SAID)]
            text = self._render([_USER, said[0], _USER, said[1], _USER])
            if text is not None and _SAID in text and _THOUGHT not in text:
                return {"reasoning_format": format.name}
        return {}
