"""What the voices of `speech` say: lower-case words as they are spoken, which `normalize` reads.

Values are those of `normalize`, with its split: a held-out utterance has values that training never says. Everyday
phrases are held out by the CRC of their text. Every word has one spelling: "p m" and "pm"
sound alike.
"""

from __future__ import annotations

import random
import re
import zlib

from lab.training import pairs
from lab.training.spoken import words

LONGEST = 14  # words

_ALONE = ("digits", "digits", "cardinal", "cardinal", "date", "date", "moment", "time", "time", "money", "ordinal")
_WITH_VALUE = tuple(
    line.strip()
    for line in """
    the meeting is on {moment}
    the {event} is on {date}
    the {event} is at {time}
    the {event} starts at {time}
    the train to {place} leaves at {time}
    the train from {place} arrives at {time}
    {name} was born on {date}
    {name} will be in {place} on {date}
    wake me up at {time}
    set the alarm for {time}
    remind {name} at {time}
    my number is {digits}
    call {name} on {digits}
    the code is {digits}
    the ticket costs {money}
    {name} paid {money}
    there are {cardinal} people in {place}
    we need {cardinal} tickets
    this is the {ordinal} {event}
    """.splitlines()
    if line.strip()
)
_PHRASES = tuple(
    line.strip()
    for line in """
    hello how are you
    good {part}
    good {part} {name}
    thank you very much
    thank you {name}
    what time is it
    what day is it today
    how is the weather in {place}
    how is the weather today
    turn {state} the {device}
    turn {state} the {device} in the {room}
    please turn {state} the {device}
    play some music
    stop the music
    where is {name}
    where is the {event}
    this is {name} speaking
    please call {name}
    {name} is in the {room}
    {name} is in {place}
    {name} and {name} are in {place}
    the {event} in {place} is {day}
    the {event} is {day}
    the {room} is open
    show me the way to {place}
    open the {room} door
    see you {day}
    yes please
    no thank you
    """.splitlines()
    if line.strip()
)
_WORDS = {
    "name": words("anna david emma henry laura martin nora paula robert simon victor alice daniel maria peter julia"),
    "place": words("london paris berlin tokyo boston chicago madrid rome vienna oslo dublin sydney"),
    "event": words("meeting concert lesson party flight dinner match show exam interview"),
    "part": words("morning afternoon evening night"),
    "state": words("on off"),
    "device": words("light lights heating television radio fan"),
    "room": words("kitchen bedroom garden office hall cellar"),
    "day": words("today tomorrow monday tuesday wednesday thursday friday saturday sunday"),
}
_ONE_SPELLING = {r"\bam\b": "a m", r"\bpm\b": "p m", r"[-,]": " "}


def draw(rng: random.Random, *, held_out: bool) -> str:
    """Return a random utterance: a value alone, a sentence with one, or an everyday phrase."""
    while True:
        kind = rng.random()
        if kind < 0.45:
            text = pairs.spoken_value(rng, _pick(rng, _ALONE), held_out=held_out)
        else:
            text = _filled(rng, held_out, _WITH_VALUE if kind < 0.8 else _PHRASES)
        for pattern, spelling in _ONE_SPELLING.items():
            text = re.sub(pattern, spelling, text)
        if len(text.split()) <= LONGEST:
            return " ".join(text.split())


def held_out_utterances(count: int, seed: int = 0) -> list[str]:
    """Return `count` distinct held-out utterances, the same on every machine."""
    rng, texts = random.Random(seed), dict[str, None]()
    while len(texts) < count:
        texts.setdefault(draw(rng, held_out=True))
    return list(texts)


def _filled(rng: random.Random, held_out: bool, templates: tuple[str, ...]) -> str:
    """Fill a template; a phrase without a value is drawn again until it is on the wanted side."""

    def slot(match: re.Match[str]) -> str:
        kind = match.group(1)
        return _pick(rng, _WORDS[kind]) if kind in _WORDS else pairs.spoken_value(rng, kind, held_out=held_out)

    while True:
        template = _pick(rng, templates)
        text = re.sub(r"\{(\w+)\}", slot, template)
        if templates is _WITH_VALUE or held_out == (text != template and zlib.crc32(text.encode()) % 10 == 0):
            return text


def _pick(rng: random.Random, options: tuple[str, ...] | list[str]) -> str:
    return options[int(rng.random() * len(options))]
