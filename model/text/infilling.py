"""Makes the prompt that asks a model for the middle of a text (Bavarian et al., 2022).

Nothing in the texts of a user is read as a special token: a mark that somebody spells stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import tokenizers

from triptych.model.text.fill_marks import FillMarks, Ids, OtherFile
from triptych.model.text.piece_tokenizers import PieceTokenizer
from triptych.model.text.sentencepiece_model import SPACE

_ANCHOR = "\n"  # what a part of a text is put after, where a tokenizer puts a space in front of every text
_NOTHING = re.compile("(?!)")
_CHARACTERS_PER_TOKEN = 16  # of a long text that is cut; a text with longer tokens is cut shorter than necessary
_LONGEST_NAME = 1024  # characters
_SUFFIX_SHARE = 4  # a suffix gets one part in four of a prompt that is cut, as in llama.cpp


class PromptTokens(NamedTuple):
    """The tokens of a prompt."""

    ids: Ids
    begin: int  # of the part that the output continues
    end: int
    is_cut: bool = False  # whether parts were left out to fit


class Infilling:
    """A vocabulary's marks, and the texts between them as tokens. Thread-safe."""

    def __init__(self, built: tokenizers.Tokenizer | PieceTokenizer, marks: FillMarks, ends: tuple[Ids, Ids]) -> None:
        """`ends`: the tokens that are put before and after a whole text."""
        self.marks = marks
        self._begin, self._end = ends
        if isinstance(built, PieceTokenizer):
            plain = replace(built, specials=_NOTHING)
            self._encode: Callable[[str], Ids] = lambda text: tuple(plain.encode(text, add_special_tokens=False))
            self._name, self._anchor = built.tokenizer.id_to_token, Ids()
            return
        self._encode = _plain_encoder(built, marks)
        self._name = built.id_to_token
        anchor = self._encode(_ANCHOR)
        self._anchor = anchor if anchor and (self._name(anchor[0]) or "").startswith(SPACE) else ()

    def prompt(
        self, prefix: str, suffix: str, files: Sequence[OtherFile] = (), *, most: int | None = None
    ) -> PromptTokens:
        """Return the prompt for the text between prefix and suffix.

        A prompt of more than `most` tokens is cut as in llama.cpp: first the beginning of the other files, then the
        beginning of the prefix and the end of the suffix. The suffix keeps a quarter of the room.
        """
        if most is not None:
            longest = _CHARACTERS_PER_TOKEN * most
            prefix, suffix, files = prefix[-longest:], suffix[:longest], _last(files, longest)
        before, after = self.part(prefix), self.part(suffix, continues=self.marks.sentinel is None)
        others = self.marks.others(files, lambda text: self.part(text, continues=True))
        whole = self._joined(others, before, after)
        if most is None or len(whole.ids) <= most:
            return whole
        room = max(0, most - (len(whole.ids) - len(others) - len(before) - len(after)))
        if len(before) + len(after) <= room:
            left = room - len(before) - len(after)
        else:
            left, share = 0, max(room // _SUFFIX_SHARE, room - len(before))
            after = after[:share]
            before = before[len(before) - min(len(before), room - len(after)) :]
        return self._joined(others[len(others) - left :], before, after)._replace(is_cut=True)

    def part(self, text: str, *, continues: bool = False) -> Ids:
        """Return the tokens of a part of a text; `continues`: no space is put in front of it."""
        if not text:
            return ()
        anchored = continues and self._anchor
        found = self._encode(f"{_ANCHOR}{text}")[len(self._anchor) :] if anchored else self._encode(text)
        if self.marks.all.isdisjoint(found):
            return found
        return tuple(one for token in found for one in (self._spelled(token) if token in self.marks.all else (token,)))

    def _spelled(self, mark: int) -> Ids:
        """Return a mark that is an ordinary entry of the vocabulary as the tokens of its characters."""
        text = (self._name(mark) or "").replace(SPACE, " ")
        return tuple(one for character in text for one in self.part(character, continues=True))

    def _joined(self, others: Ids, before: Ids, after: Ids) -> PromptTokens:
        ids, begin = self.marks.around(before, after)
        begin += len(self._begin) + len(others)
        end = self._end if self.marks.sentinel is not None else ()  # a decoder's text goes on
        return PromptTokens((*self._begin, *others, *ids, *end), begin, begin + len(before))


def _last(files: Sequence[OtherFile], characters: int) -> list[OtherFile]:
    """Return the last files and the end of the one before, of about this length."""
    kept: list[OtherFile] = []
    for one in reversed(files):
        if characters <= 0:
            break
        kept.append(OtherFile(one.name[:_LONGEST_NAME], one.text[-characters:]))
        characters -= len(one.text) + len(one.name)
    return kept[::-1]


def _plain_encoder(whole: tokenizers.Tokenizer, marks: FillMarks) -> Callable[[str], Ids]:
    """Return a function that encodes with the model of a tokenizer, which it shares, and finds no special tokens."""
    plain = tokenizers.Tokenizer(whole.model)
    if whole.normalizer is not None:
        plain.normalizer = whole.normalizer
    if whole.pre_tokenizer is not None:
        plain.pre_tokenizer = whole.pre_tokenizer
    added = sorted(whole.get_added_tokens_decoder().items())
    kept = {token: known for token, known in added if not known.special and token not in marks.all}
    plain.add_tokens(list(kept.values()))
    here = {plain.token_to_id(known.content): token for token, known in kept.items()}
    changed = {own: token for own, token in here.items() if own != token}

    def encode(text: str) -> Ids:
        [found] = plain.encode_batch_fast([text], add_special_tokens=False)
        return tuple(changed.get(token, token) for token in found.ids) if changed else tuple(found.ids)

    return encode
