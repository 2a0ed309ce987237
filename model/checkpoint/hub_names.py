"""Reads names of models on the Hugging Face Hub, in all the ways that people write them.

    ORGANISATION/NAME                  hf:ORGANISATION/NAME                a repository
    ORGANISATION/NAME@REVISION                                             at a branch, tag or commit
    ORGANISATION/NAME:Q4_K_M                                               its GGUF file of that number format
    ORGANISATION/NAME:folder/file.gguf  ORGANISATION/NAME/folder/file.gguf one GGUF file
    https://huggingface.co/ORGANISATION/NAME/blob/main/file.gguf           an address from the browser; hf.co too

`str(HubName)` is the canonical form, which begins with `hf:`. Nothing here asks the network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from triptych.model.errors import ConfigError

PREFIX = "hf:"
EXPECTED = "expected ORGANISATION/NAME, and then :QUANTIZATION or :FILE.gguf, @REVISION, or both"
_GGUF = ".gguf"
_REPOSITORY = r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
_NAME = re.compile(rf"{_REPOSITORY}(:(?P<selector>[\w./-]+))?(@(?P<revision>[\w./-]+))?", re.ASCII)
_WITH_FILE = re.compile(rf"{_REPOSITORY}/(?P<selector>[\w./-]+\.gguf)(@(?P<revision>[\w./-]+))?", re.I | re.ASCII)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_BARE_HOST = re.compile(rf"(?:{'|'.join(map(re.escape, _HOSTS))})/.*")
_OTHER_KINDS = ("datasets", "spaces", "docs", "blog", "papers", "collections", "buckets", "kernels")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hub, its revision (None: main), and which of its GGUF files is meant ("": the whole)."""

    repository: str
    revision: str | None = None
    selector: str = ""  # a number format such as Q4_K_M, or a file's path in the repository

    def __str__(self) -> str:
        selector = f":{self.selector}" if self.selector else ""
        return f"{PREFIX}{self.repository}{selector}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_file(self) -> bool:
        """Whether the selector is a file's path."""
        return self.selector.lower().endswith(_GGUF)

    @property
    def model_name(self) -> str:
        """The last part of the repository's name, by which the model is served unless it is given another."""
        return self.repository.rpartition("/")[2]


def is_hub_name(text: str) -> bool:
    """Return whether a text is a name of the Hub in its canonical form."""
    return text.startswith(PREFIX)


def parse(text: str) -> HubName:
    """Read a name or an address of the Hub; raises `ConfigError`."""
    if (address := _address(text)) is not None:
        return _of_address(text, address)
    found = text.removeprefix(PREFIX).removeprefix("//")
    match = _NAME.fullmatch(found) or _WITH_FILE.fullmatch(found)
    if match is None or ".." in found:
        raise ConfigError(f"{text[:200]}: {EXPECTED}")
    return HubName(match["repository"], match["revision"], match["selector"] or "")


def may_be_hub_name(text: str) -> bool:
    """Return whether a text without `hf:` has the form of a name or an address of the Hub."""
    match = _NAME.fullmatch(text) or _WITH_FILE.fullmatch(text)
    return _address(text) is not None or (match is not None and ".." not in text)


def is_address(text: str) -> bool:
    """Return whether a text is a web address."""
    return _address(text) is not None


def _address(text: str) -> str | None:
    """Return a web address with its scheme; None: the text is none."""
    text = text.strip()
    if text.startswith(("https://", "http://")):
        return text
    return f"https://{text}" if _BARE_HOST.fullmatch(text) else None


def _of_address(text: str, address: str) -> HubName:
    """Read the address of a model's page, or of one of its files."""
    parts = urlsplit(address)
    own = os.environ.get("HF_ENDPOINT", "")
    if parts.hostname not in _HOSTS and parts.netloc != urlsplit(own).netloc:
        raise ConfigError(f"{text[:200]}: expected an address of huggingface.co, found the host {parts.netloc[:100]!r}")
    path = [unquote(part) for part in parts.path.split("/") if part]
    if path and path[0] in _OTHER_KINDS:
        raise ConfigError(f"{text[:200]}: expected the page of a model, found one of {path[0]}")
    repository, kind, rest = "/".join(path[:2]), "".join(path[2:3]), path[3:]
    revision, file = None, ""
    if kind in ("tree", "blob", "resolve", "raw", "commit", "commits") and rest:
        whole = 3 if rest[0] == "refs" and len(rest) >= 3 else 1  # refs/pr/1 is one revision
        revision, file = "/".join(rest[:whole]), "/".join(rest[whole:])
    name = f"{repository}{f':{file}' if file.lower().endswith(_GGUF) else ''}"
    try:
        return parse(name + (f"@{revision}" if revision not in (None, "main") else ""))
    except ConfigError:
        raise ConfigError(f"{text[:200]}: found no repository in the address, expected /ORGANISATION/NAME") from None
