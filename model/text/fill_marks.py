"""The marks with which a model fills in the middle of a text, and the prompt that they make (Bavarian et al., 2022).

A decoder reads the prefix and the suffix after a mark each, and writes the middle after a third one. Families differ in
the marks' texts and in which part comes first. An encoder-decoder with sentinels reads one in the place of the middle.

The marks of a family are found by their texts, or by the ids that GGUF metadata name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """The texts of one family's marks."""

    prefix: str
    suffix: str
    middle: str  # empty: the middle follows the prefix
    suffix_first: bool = False


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Family("<PRE>", "<SUF>", "<MID>"),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Family("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
_REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>", "<fim-repo>", "<REPO>")
_FILES = ("<|file_sep|>", "<file_sep>", "<filename>", "<|file_separator|>")
_ENDS = (  # tokens that end a middle, apart from the marks
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "[MIDDLE]"),
    *("<|endoftext|>", "<\uff5cend▁of▁sentence\uff5c>"),
)
GGUF_KEYS = {  # of metadata, the older one last
    "fill_prefix": ("fim_pre_token_id", "prefix_token_id"),
    "fill_suffix": ("fim_suf_token_id", "suffix_token_id"),
    "fill_middle": ("fim_mid_token_id", "middle_token_id"),
    "fill_repository": ("fim_rep_token_id",),
    "fill_file": ("fim_sep_token_id",),
}
_SENTINEL = "<extra_id_{}>"  # T5
_MOST_SENTINELS = 100
_SNIPPET = "\n\n--- snippet ---\n\n"  # between other files, for a model without a mark for them; llama.cpp's
_UNKNOWN_REPOSITORY, _UNKNOWN_FILE = "myproject\n", "filename\n"  # llama.cpp's, for names that no client sends


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A part of another file, which a model reads before the prefix."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The ids of the marks of one vocabulary."""

    prefix: int | None  # None in an encoder-decoder
    suffix: int | None
    middle: int | None
    repository: int | None
    file: int | None
    ends: Ids  # tokens that end the middle
    suffix_first: bool = False
    sentinel: int | None = None  # of an encoder-decoder

    @property
    def started(self) -> Ids:
        """The tokens with which an encoder-decoder's output starts."""
        return _some(self.sentinel)

    @property
    def read(self) -> frozenset[int]:
        """The ids that a prompt may contain."""
        named = (self.prefix, self.suffix, self.middle, self.repository, self.file, self.sentinel)
        return frozenset(mark for mark in named if mark is not None)

    @property
    def all(self) -> frozenset[int]:
        """The ids that the text of a user must not contain."""
        return self.read | frozenset(self.ends)

    def around(self, prefix: Ids, suffix: Ids) -> tuple[Ids, int]:
        """Return the tokens of a prompt without its start and end, and where in them the prefix begins."""
        if self.sentinel is not None:
            return (*prefix, self.sentinel, *suffix), 0
        before, after = _some(self.prefix), _some(self.suffix)
        end = _some(self.middle)
        if self.suffix_first:
            return (*after, *suffix, *before, *prefix, *end), len(after) + len(suffix) + len(before)
        return (*before, *prefix, *after, *suffix, *end), len(before)

    def others(self, files: Sequence[OtherFile], ids: Callable[[str], Ids]) -> Ids:
        """Return the tokens of other files; `ids` tokenises a text."""
        if not files:
            return ()
        found: list[int] = []
        if self.repository is not None:
            found += (self.repository, *ids(_UNKNOWN_REPOSITORY))
        for one in files:
            head = ids(_SNIPPET) if self.file is None else (self.file, *ids(f"{one.name}\n"))
            found += (*head, *ids(one.text))
        if self.file is not None:
            found += (self.file, *ids(_UNKNOWN_FILE))
        return tuple(found)


def find_marks(token_id: Callable[[str], int | None], names: Mapping[str, str]) -> FillMarks | None:
    """Return the marks of a decoder's vocabulary; None if it has none. `names`: texts by the keys of `GGUF_KEYS`."""

    def first(*texts: str) -> int | None:
        return next((found for text in texts if text and (found := token_id(text)) is not None), None)

    named = _Family(names.get("fill_prefix", ""), names.get("fill_suffix", ""), names.get("fill_middle", ""))
    for family in [named, *_FAMILIES] if named.prefix and named.suffix else _FAMILIES:
        prefix, suffix, middle = first(family.prefix), first(family.suffix), first(family.middle)
        if prefix is None or suffix is None or (family.middle and middle is None):
            continue
        repository = first(names.get("fill_repository", ""), *_REPOSITORIES)
        file = first(names.get("fill_file", ""), *_FILES)
        ends = (prefix, suffix, middle, repository, file, *map(token_id, _ENDS))
        known = tuple(dict.fromkeys(end for end in ends if end is not None))
        return FillMarks(prefix, suffix, middle, repository, file, known, family.suffix_first)
    return None


def find_sentinels(token_id: Callable[[str], int | None]) -> FillMarks | None:
    """Return the sentinels of an encoder-decoder's vocabulary as marks; None if it has none.

    The output begins after the first sentinel, and any sentinel ends it.
    """
    found = [token_id(_SENTINEL.format(number)) for number in range(_MOST_SENTINELS)]
    ids = tuple(one for one in found if one is not None)
    return None if found[0] is None else FillMarks(None, None, None, None, None, ids, sentinel=found[0])


def _some(mark: int | None) -> Ids:
    return () if mark is None else (mark,)
