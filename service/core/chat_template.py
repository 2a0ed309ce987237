"""Chat templates of checkpoints, which turn a conversation into a prompt.

A template comes only from the checkpoint's folder; a request can set tools, `add_generation_prompt`,
`continue_final_message`, and variables of the template's own. Templates are rendered in a process that can be killed
(`service.sandbox.chat_main`), the first time when the model is loaded, as a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.json_files import read_json
from model.errors import ConfigError
from model.gguf.container import gguf_path
from model.text.gguf_tokenizer import gguf_tokenizer_config
from service.core.errors import ApiError, invalid, scrub
from service.sandbox.chat_pool import RenderError, RenderPool, RenderWorker

Messages = Sequence[Mapping[str, Any]]

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GIVEN = frozenset(
    {
        *_TOKENS,
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "dict",
        "namespace",
        "range",
        "cycler",
        "joiner",
        "raise_exception",
        "strftime_now",
    }
)  # names that no request may set
_TEST_CONVERSATION = ({"role": "user", "content": "Hello"},)
_TEST_SECONDS, _TEST_MAX_CHARACTERS = 5.0, 1_000_000
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # whether its space survives shows whether the template strips content


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Holds a Jinja template, the special tokens that it may name (`bos_token` ...), and `names`, all that it reads."""

    source: str
    tokens: Mapping[str, str]
    names: frozenset[str]

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Read the folder's template and render it once as a test; None if there is none. Raises `ConfigError`.

        `chat_template.jinja` wins over `chat_template` in tokenizer_config.json. That is a text, or a list of named
        templates, of which the one named `default` is used. A GGUF file has it in its metadata, which files beside it
        in a folder overrule.
        """
        found = template_of(folder)
        return None if found is None else cls.tested(*found, folder.name)

    @classmethod
    def tested(cls, source: str, tokens: Mapping[str, str], name: str) -> ChatTemplate:
        """Compile the template and render a short conversation, which it may refuse by `raise_exception`.

        `name` is whose template it is, for the message of a `ConfigError`.
        """
        worker = RenderWorker(_TEST_SECONDS)
        try:
            template = cls(source, tokens, worker.names(source))
            variables = template.variables(_TEST_CONVERSATION, add_generation_prompt=True)
            worker.render(source, variables, _TEST_MAX_CHARACTERS)
        except RenderError as error:
            if error.kind != "raised":
                raise ConfigError(f"{name}: the chat template does not render ({error.kind}): {error}") from None
        finally:
            worker.close()
        return template

    def reads(self, name: str) -> bool:
        """Return whether the template reads this variable."""
        return name in self.names

    def takes(self, name: str) -> bool:
        """Return whether a request may set this variable: the template reads it, and it is not the service's."""
        return name not in _GIVEN and self.reads(name)

    def variables(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the variables that the template can read; `more` are those that a request sets."""
        return {
            **(more or {}),
            **self.tokens,
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    async def render(
        self,
        pool: RenderPool,
        messages: Messages,
        limit: int,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt, of at most `limit` characters; raises `ApiError` naming `messages`."""
        try:
            variables = self.variables(messages, add_generation_prompt=add_generation_prompt, tools=tools, more=more)
            return await pool.render(self.source, variables, limit)
        except RenderError as error:
            raise _refusal(error) from None

    async def continued(
        self,
        pool: RenderPool,
        messages: Messages,
        limit: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt up to the end of the last message's content, so that the model continues it."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise invalid("continue_final_message: the last message has no content", "continue_final_message")
        tagged = [*messages[:-1], {**messages[-1], "content": content + _TAG}]
        text = await self.render(pool, tagged, limit + len(_TAG), add_generation_prompt=False, tools=tools, more=more)
        before, found, after = text.rpartition(_TAG.strip())
        if not found or content.strip() not in before:
            raise invalid(
                "continue_final_message: the chat template leaves the last message out", "continue_final_message"
            )
        return before if after.startswith(" ") else before.rstrip()


def template_of(folder: Path) -> tuple[str, dict[str, str]] | None:
    """Return the folder's template and the special tokens that it may name; None if there is none."""
    config = read_json(folder / "tokenizer_config.json")
    if (gguf := gguf_path(folder)) is not None:
        config = {**gguf_tokenizer_config(gguf), **config}
    file = folder / "chat_template.jinja"
    source = (
        file.read_text(encoding="utf-8") if file.is_file() else _default_template(folder, config.get("chat_template"))
    )
    if source is None:
        return None
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    return source, {name: text for name in _TOKENS if (text := _token_text(named.get(name))) is not None}


def _default_template(folder: Path, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        named = {one.get("name"): one.get("template") for one in value}
        if isinstance(default := named.get("default"), str):
            return default
    raise ConfigError(
        f"{folder.name}: tokenizer_config.json: chat_template must be a text or a list of named ones with one called "
        "default"
    )


def _token_text(token: object) -> str | None:
    """Return the text of a special token, which is stored as text or as an object that describes it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _refusal(error: RenderError) -> ApiError:
    if error.kind == "busy":
        return ApiError(
            429,
            "too many conversations are being rendered; try again after the time in Retry-After",
            type="overloaded_error",
            code="queue_full",
            headers={"Retry-After": "1"},
            reason="chat_templates",
        )
    if error.kind == "length":
        message = f"messages make a prompt of {error}, which cannot fit the model"
        return invalid(message, "messages", "context_length_exceeded")
    if error.kind == "raised":
        return invalid(f"the chat template refuses these messages: {scrub(str(error))}", "messages", "chat_template")
    detail = f"{error.kind}: {scrub(str(error))}"
    return invalid(f"the chat template cannot render these messages ({detail})", "messages", "chat_template")
