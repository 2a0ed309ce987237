"""Prompts of English words with a given number of tokens.

A text is `The` and further words. The number of tokens that each word adds is counted once, by the served model's
tokenizer (a tokenizer.json or the server's /tokenize), so that a prompt is made by addition, in microseconds. The sum
is exact for tokenizers that split at spaces first; results report the server's usage in any case. Without a tokenizer
the counts are marked as estimates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from triptych.loadtest.errors import UsageError

OPENING = "The"
_TEXT = """about above accept across action active add after again age ago agree air all almost alone along already
also always among and animal another answer any appear apple area arm around arrive art as ask at away back bad bag
balance ball bank base be bear beat because become bed before begin behind believe below best better between big bird
black blue board boat body book both bottle bottom box branch bread break bridge bring brother build burn business but
buy by call camp can captain car card care carry case catch cause cell center chance change child choose circle city
class clean clear climb clock close cloud coast cold color come common compare complete contain control cook cool copy
corn corner correct cost cotton could count country course cover create crop cross crowd cry current cut dance danger
dark day deal decide deep degree depend describe desert design develop differ direct discuss divide do doctor dog door
double down draw dream dress drink drive drop dry during each ear early earth east easy eat edge effect egg eight
either electric else end energy engine enough enter equal even evening event ever every exact example except excite
expect eye face fact fair fall family far farm fast father fear feed feel few field fight figure fill final find fine
finger finish fire first fish five flat floor flow flower fly follow food for force forest form forward four free
fresh friend from front fruit full game garden gas gather general gentle get give glass go gold good govern grass
great green ground group grow guess hand happen happy hard have he head hear heart heat heavy help here high hill
history hold home hope horse hot hour house how hundred hunt hurry ice idea if imagine in inch include industry insect
instant invent iron is island it job join joy jump just keep key kind king know lake land language large last late
laugh law lay lead learn least leave left leg less letter level life lift light like line liquid list listen little
live locate long look loud love low machine main make man many map mark market mass match material matter may mean
measure meet melody metal method middle might mile milk million mind mine minute miss mix modern money month moon more
morning mother motion mount mountain move much music must name nation nature near need never new next night nine noise
north nose note nothing notice noun now number object observe ocean of off offer office often oil old on once one only
open or order other our out over own page paint pair paper part party pass past path pay people perhaps phrase picture
piece place plan plane planet plant play point poor port possible power prepare present press problem process produce
product property provide pull push put question quick quiet quite race rain raise range reach read ready real reason
record red region remember repeat reply rest result return rich ride right ring rise river road rock roll room root
rope rose round row rule run safe sail salt same sand say scale school science score sea season seat second section see
seed seem select self sell send sense sentence separate serve set settle seven shape share sharp ship shoe shop short
should show side sign silver similar simple since sing sister sit six size skill skin sky sleep slow small smell smile
snow so soft soil soldier solve some song soon sound south space speak special speed spell spend spread spring square
stand star start state station stay steam steel step still stone stop store story straight strange stream street
string strong student study such sudden sugar suit summer sun supply support sure surface surprise swim system table
tail take talk teach team tell ten term test than that the then there these they thing think third this though thought
thousand three through time tiny to together tone too tool top total touch toward town track trade train travel tree
triangle trip true try turn twenty two type under unit until up use usual valley value vary verb very view village
visit voice wait walk wall want war warm wash watch water wave way we wear weather week weight well west what wheel
when where which while white who whole why wide wild will win wind window wing winter wire wish with woman wonder wood
word work world would write wrong yard year yellow yes yet you young"""
WORDS = _TEXT.split()

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Holds words and the tokens that each adds after another; `overhead`: of `OPENING` and the special tokens."""

    words: list[str]
    costs: list[int]
    overhead: int
    source: str

    def text(self, rng: random.Random, tokens: int, *, opening: bool = True) -> str:
        """Return a text of `tokens` tokens, which include `OPENING` and special tokens at the start of a prompt."""
        chosen = [OPENING] if opening else []
        left = tokens - (self.overhead if opening else 0)
        count = len(self.words)
        while left > 0:
            at = rng.randrange(count)
            if self.costs[at] > left:
                at = self._fitting(at, left)
                if at < 0:
                    break
            chosen.append(self.words[at])
            left -= self.costs[at]
        return " ".join(chosen)

    def _fitting(self, at: int, left: int) -> int:
        """Return the next word that adds at most `left` tokens; -1: there is none."""
        count = len(self.words)
        return next((i % count for i in range(at, at + count) if self.costs[i % count] <= left), -1)


def estimated() -> Vocabulary:
    """Estimate tokens without a tokenizer: one for four letters, and at least one for a word."""
    costs = [max(1, round(len(word) / 4)) for word in WORDS]
    return Vocabulary(WORDS, costs, 1, "estimate: 4 letters a token, no tokenizer at hand")


def counted(count: Count, source: str, words: list[str] = WORDS) -> Vocabulary:
    """Count the tokens of every word after `OPENING`; `count` includes special tokens."""
    overhead = count(OPENING)
    return Vocabulary(words, [max(1, count(f"{OPENING} {word}") - overhead) for word in words], overhead, source)


def from_file(path: Path) -> Vocabulary:
    """Count with a tokenizer.json, or a folder that has one. Raises `UsageError`."""
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"--tokenizer: found {str(path)!r}, expected a tokenizer.json ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return counted(lambda text: len(tokenizer.encode(text).ids), "tokenizer.json")
