"""Sentence templates for values, and the plain words around them, which are copied."""

from __future__ import annotations

from lab.training.spoken import (
    CURRENCIES,
    MONTHS,
    SMALL,
    TENS,
    UNITS,
    WEEKDAYS,
    ordinal,
    words,
)

# Words of values; a plain word among them could make a text ambiguous.
RESERVED = frozenset(
    " ".join(
        [
            *(SMALL + TENS + MONTHS + WEEKDAYS),
            *(ordinal(n) + s for n in [*range(1, 20), *range(20, 100, 10), 100, 1000, 10**6] for s in ("", "s")),
            *(name for names in [*CURRENCIES.values(), *UNITS] for name in names),
            "hundred thousand million a and oh nought minus negative point double triple half quarter quarters",
            "past to at on of the in am pm m p noon midday midnight morning afternoon evening night o'clock",
            "percent per cent",
        ]
    ).split()
)

WORDS = {
    "name": words(
        "anna ben clara david emma felix grace henry iris jonas karen laura martin nora oscar paula robert "
        "sara thomas ursula victor walter yara zoe alice bruno carmen daniel elena frank georgia hannah ivan "
        "julia kevin linda maria nathan olivia peter quentin rachel simon tina vera william maya leo mr smith "
        "dr jones priya ahmed chen fatima hiroshi ingrid"
    ),
    "noun": words(
        "meeting call lesson concert lecture workshop interview appointment dinner party delivery flight "
        "train bus ferry match show exam review launch course session ceremony wedding conference deadline "
        "inspection repair reservation booking order invoice contract project report budget ticket house "
        "garden river bridge tower museum library machine engine battery package parcel letter book song film "
        "photo painting ship road tunnel school bakery factory hotel office account sensor server printer "
        "window table"
    ),
    "nouns": words(
        "people books tickets apples oranges chairs boxes letters students visitors houses trees cars ships "
        "birds horses pages copies items orders bottles stamps photos songs seats rooms beds employees "
        "members voters players teams bricks candles flowers guests lamps coins maps shoes keys plates rivers "
        "islands stars files users lines"
    ),
    "place": words(
        "london paris berlin tokyo boston chicago madrid rome vienna oslo dublin lisbon cairo delhi sydney "
        "toronto prague athens stockholm geneva hamburg munich zurich warsaw helsinki porto seville naples "
        "lagos nairobi lima bogota kyoto seoul downtown"
    ),
    "adjective": words(
        "annual big blue bright broken cheap clean cold daily early empty famous final free fresh green happy "
        "heavy large late local long main modern narrow new next nice old open public quick quiet red round "
        "sharp short slow small special strong sunny tall tiny warm weekly ancient careful crowded electric "
        "formal gentle hidden modest polite private rapid silent useful white wide wooden young"
    ),
    "verb": words(
        "starts begins opens closes ends leaves arrives stops returns continues departs finishes resumes happens"
    ),
    "did": words(
        "bought sold found counted ordered packed moved painted saved needed wanted lost sent received "
        "printed collected checked delivered produced borrowed returned cleaned shipped carried washed drew "
        "wrote noticed rented tested traded stored opened"
    ),
}

TEMPLATES = tuple(
    line.strip()
    for line in """
    the {noun} is on {moment}
    the {adjective} {noun} {verb} on {moment}
    the {noun} in {place} {verb} on {date}
    the {noun} {verb} at {time}
    the {noun} {verb} at {time} on {date}
    {name} will meet {name} on {moment}
    {name} was born on {date}
    {name} was born on {date} in {place}
    please book the {noun} for {moment}
    please move the {noun} from {date} until {date}
    we are open from {time} until {time}
    the {noun} takes place in {place} on {moment}
    can you call {name} at {time}
    remind me about the {noun} at {time}
    remind {name} about the {adjective} {noun} on {date}
    wake me up at {time}
    set the alarm for {time}
    the last {noun} leaves {place} at {time}
    {name} and {name} arrive at {time}
    the {noun} from {place} arrives before {time}
    it was built in {month} by {name}
    the {noun} was finished in {month}
    since {month} the {noun} has been {adjective}
    the {adjective} {noun} will open in {month}
    it was the {ordinal} {noun} in {place}
    {name} finished the race in {ordinal} place
    this is the {ordinal} {adjective} {noun}
    {name} lives on the {ordinal} floor
    the {ordinal} {noun} costs {money}
    the {noun} costs {money}
    the {adjective} {noun} costs {money} in {place}
    {name} paid {money} for the {noun}
    {name} owes {name} {money}
    the price of the {noun} rose from {money} until it was {money}
    send {money} before {date}
    {name} {did} {cardinal} {nouns}
    {name} {did} {cardinal} {nouns} for {money}
    {name} {did} {cardinal} {adjective} {nouns} in {month}
    there are {cardinal} {nouns} in {place}
    {cardinal} {nouns} came for the {noun}
    about {cardinal} {nouns} were {did} in {place}
    we {did} {cardinal} {nouns} with {cardinal} {nouns}
    {percent} of the {nouns} were {adjective}
    {percent} of the {nouns} in {place} were {did}
    prices in {place} rose by {percent}
    {name} got {percent} in the {noun}
    the {noun} fell by {percent} in {month}
    {fraction} of the {nouns} are {adjective}
    {name} ate {fraction} of the cake
    add {fraction} cups of sugar
    the average is {number}
    the {noun} scored {number} in the {noun}
    multiply the result by {number}
    the value of the {adjective} {noun} is {number}
    call me on {digits}
    the code of the {noun} is {digits}
    my number is {digits}, my name is {name}
    {name} can be reached under {digits} in {place}
    the {noun} is {quantity} long
    it is {quantity} from {place}
    the {adjective} {noun} weighs {quantity}
    the temperature in {place} is {quantity}
    wait for {quantity} before the {noun} {verb}
    {name} ran {quantity} with {name}
    the {noun} of {name} is {quantity} away
    """.splitlines()
    if line.strip()
)
PLAIN_TEMPLATES = (  # without values; only for training, since they would improve the held-out score
    "the {adjective} {noun} {verb} in {place}",
    "{name} {did} the {adjective} {noun} in {place}",
    "please call {name} about the {noun}",
)
