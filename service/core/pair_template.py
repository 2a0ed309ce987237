"""Chat templates of rerankers: the text of a pair of query and document.

sentence-transformers gives a reranker's template the prompt as a system message, then two messages of the roles `query`
and `document`. The template is rendered once, when the model is loaded, in a process that can be killed
(`triptych.service.chat.render_main`). Requests insert their texts into the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.model.checkpoint.sentence_transformers import MessageSettings
from triptych.model.errors import ConfigError
from triptych.model.text.tokenizer import Encoded, Tokenizer
from triptych.service.chat.render_pool import RenderError, RenderWorker
from triptych.service.chat.template_files import template_files

_SECONDS, _MAX_CHARACTERS = 5.0, 1_000_000
_PLACES = ("query-u3Xq", "document-Zt7w")
_HARD = ' A <b> "c" & {{ d }}\n é\t '  # text that stripping, escaping and other filters would change


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The texts before, between and after a query and a document."""

    before: str
    between: str
    after: str
    strips: bool  # whether the template strips white space from both ends of the two texts

    @classmethod
    def from_folder(cls, folder: Path, settings: MessageSettings, prompt: str) -> PairTemplate:
        """Render the folder's template; raises `ConfigError` unless it has the query and then the document."""
        found = template_files(folder)
        if found is None:
            raise ConfigError(f"{folder.name}: there is no chat template, which its pairs of texts need")
        source, tokens = found.default(folder.name), found.tokens

        def rendered(query: str, document: str) -> str:
            variables = _variables(tokens, settings, prompt, query, document)
            try:
                return worker.render(source, variables, _MAX_CHARACTERS)
            except RenderError as error:
                raise ConfigError(f"{folder.name}: the chat template does not render a pair: {error}") from None

        worker = RenderWorker(_SECONDS)
        try:
            text, hard = rendered(*_PLACES), rendered(_HARD, _HARD)
        finally:
            worker.close()
        before, query, rest = text.partition(_PLACES[0])
        between, document, after = rest.partition(_PLACES[1])
        if not query or not document or any(place in before + between + after for place in _PLACES):
            raise ConfigError(f"{folder.name}: the chat template must have the query and then the document, once each")
        for strips in (False, True):
            template = cls(before, between, after, strips)
            if template.text(_HARD, _HARD) == hard:
                return template
        raise ConfigError(f"{folder.name}: the chat template changes the texts of queries and documents")

    def text(self, query: str, document: str) -> str:
        if self.strips:
            query, document = query.strip(), document.strip()
        return f"{self.before}{query}{self.between}{document}{self.after}"

    def encode(self, tokenizer: Tokenizer, query: str, document: str, most: int | None = None) -> Encoded:
        """Return the tokens of a pair; raises `TooManyTokensError` for more than `most`."""
        return tokenizer.encode(self.text(query, document), add_special_tokens=False, most=most)

    def cut(self, tokenizer: Tokenizer, ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """Return the first tokens and those after the document, `limit` in all: scores are read at the last one."""
        after = tokenizer.encode(self.after, add_special_tokens=False).ids if self.after else ()
        return (*ids[: max(0, limit - len(after))], *after[-limit:])


def _variables(
    tokens: Mapping[str, str], settings: MessageSettings, prompt: str, query: str, document: str
) -> dict[str, Any]:
    said = {"query": query, "document": document}
    if prompt:
        said = {"system": prompt, **said}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if settings.structured else text}
        for role, text in said.items()
    ]
    own = {"tools": None, "documents": None, "add_generation_prompt": False}
    return {**tokens, **own, **settings.variables, "messages": messages}
