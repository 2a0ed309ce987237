"""The tools, requests and results that make up the conversations of `assistant`.

Each line of a request or an answer may name its tool's parameters and results in braces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.training.spoken import words


@dataclass(frozen=True, slots=True)
class CatalogueTool:
    """A tool with the names that it and its parameters go by, what users ask for it, and what it results in.

    `parameters` maps what a request calls a value to its kind and to the names of the parameter; `results` maps the
    keys of the result to kinds.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: dict[str, tuple[str, tuple[str, ...]]]
    requests: tuple[str, ...]
    results: dict[str, str]
    answers: tuple[str, ...]


_PLACE = ("place", ("city", "place", "location", "town"))
_PERSON = ("person", ("to", "person", "name", "recipient"))
_TEXT = ("phrase", ("text", "message", "content"))

CATALOGUE = (
    CatalogueTool(
        ("weather", "get_weather", "current_weather", "forecast"),
        ("Tells the weather.", "Returns the weather of a place.", "The current weather."),
        {"place": _PLACE},
        (
            "Is it warm in {place}?",
            "What is the weather in {place}?",
            "How is the weather in {place} today?",
            "Do I need an umbrella in {place}?",
            "Tell me the weather in {place}.",
            "Is it raining in {place} now?",
            "Will I need a coat in {place}?",
        ),
        {"temperature": "degrees", "sky": "sky"},
        ("It is {temperature} degrees and {sky} in {place}.",),
    ),
    CatalogueTool(
        ("time", "get_time", "clock", "local_time"),
        ("Tells the time.", "Returns the local time of a place.", "The time in a city."),
        {"place": _PLACE},
        (
            "What time is it in {place}?",
            "How late is it in {place}?",
            "Tell me the time in {place}.",
            "What is the time in {place} now?",
        ),
        {"time": "clock"},
        ("It is {time} in {place}.",),
    ),
    CatalogueTool(
        ("convert", "convert_currency", "exchange"),
        ("Converts money.", "Converts an amount to another currency."),
        {
            "amount": ("number", ("amount", "value")),
            "source": ("currency", ("from", "source", "base")),
            "target": ("currency", ("to", "target", "into")),
        },
        (
            "How much is {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "What are {amount} {source} in {target}?",
            "Change {amount} {source} into {target}, please.",
        ),
        {"result": "number"},
        ("{amount} {source} are {result} {target}.",),
    ),
    CatalogueTool(
        ("send_message", "message", "send_text", "text"),
        ("Sends a message.", "Sends a text to a person."),
        {"person": _PERSON, "phrase": _TEXT},
        (
            "Tell {person} that {phrase}.",
            "Send {person} a message: {phrase}.",
            "Text {person}: {phrase}.",
            "Write to {person} that {phrase}.",
            "Please let {person} know that {phrase}.",
        ),
        {"status": "sent"},
        ("I have told {person} that {phrase}.",),
    ),
    CatalogueTool(
        ("set_timer", "timer", "countdown"),
        ("Starts a timer.", "Starts a timer of some minutes."),
        {"minutes": ("minutes", ("minutes", "duration"))},
        (
            "Set a timer for {minutes} minutes.",
            "Wake me in {minutes} minutes.",
            "Start a timer of {minutes} minutes, please.",
            "Remind me in {minutes} minutes.",
        ),
        {"ends": "clock"},
        ("The timer ends at {ends}.",),
    ),
    CatalogueTool(
        ("set_temperature", "heating", "thermostat"),
        ("Sets the heating of a room.", "Sets the temperature of a room."),
        {
            "room": ("room", ("room", "where")),
            "degrees": ("degrees", ("degrees", "temperature", "target")),
        },
        (
            "Make the {room} {degrees} degrees warm.",
            "Set the {room} to {degrees} degrees.",
            "Heat the {room} to {degrees} degrees.",
            "I want {degrees} degrees in the {room}.",
        ),
        {"now": "degrees"},
        ("The {room} has {now} degrees now and will have {degrees}.",),
    ),
    CatalogueTool(
        ("light", "switch_light", "set_light"),
        ("Switches a light.", "Switches the light of a room on or off."),
        {"room": ("room", ("room", "where")), "state": ("switch", ("state", "power"))},
        (
            "Turn {state} the light in the {room}.",
            "Switch the {room} light {state}.",
            "Light {state} in the {room}, please.",
        ),
        {"status": "done"},
        ("The light in the {room} is {state}.",),
    ),
    CatalogueTool(
        ("translate", "translation", "translate_text"),
        ("Translates a text.", "Translates words to a language."),
        {"phrase": _TEXT, "language": ("language", ("language", "to", "target"))},
        (
            "What is {phrase} in {language}?",
            "Translate {phrase} to {language}.",
            "How do I say {phrase} in {language}?",
        ),
        {"translation": "word"},
        ("In {language} that is {translation}.",),
    ),
    CatalogueTool(
        ("search", "web_search", "find"),
        ("Searches the web.", "Searches for pages."),
        {"phrase": ("phrase", ("query", "q", "terms"))},
        (
            "Search for {phrase}.",
            "Look up {phrase}, please.",
            "Find something about {phrase}.",
            "Search the web for {phrase}.",
        ),
        {"title": "title", "pages": "number"},
        ("I found {pages} pages; the first is {title}.",),
    ),
    CatalogueTool(
        ("book_table", "reserve", "reservation"),
        ("Books a table.", "Books a table in a restaurant."),
        {
            "title": ("title", ("restaurant", "where", "name")),
            "count": ("few", ("people", "guests", "seats")),
            "clock": ("clock", ("time", "at")),
        },
        (
            "Book a table for {count} at {title} at {clock}.",
            "I need a table for {count} at {clock} at {title}.",
            "Reserve a table for {count} people at {title}, {clock}.",
        ),
        {"number": "number"},
        ("Your table for {count} at {title} is booked for {clock}; the number is {number}.",),
    ),
    CatalogueTool(
        ("stock_price", "quote", "share_price"),
        ("Tells the price of a share.", "Returns what a share costs."),
        {"company": ("title", ("company", "name", "symbol"))},
        (
            "What does a share of {company} cost?",
            "How is {company} doing at the stock exchange?",
            "What is the share price of {company}?",
        ),
        {"price": "number", "currency": "currency"},
        ("A share of {company} costs {price} {currency}.",),
    ),
    CatalogueTool(
        ("play_music", "play", "music"),
        ("Plays music.", "Plays music of an artist."),
        {"artist": ("person", ("artist", "by", "name"))},
        (
            "Play something by {artist}.",
            "I want to hear {artist}.",
            "Play {artist}, please.",
        ),
        {"song": "title"},
        ("I am playing {song} by {artist}.",),
    ),
)
SMALL_TALK = (
    ("Hello", "Hello! What can I do for you?"),
    ("Hi", "Hello! What can I do for you?"),
    ("Good morning", "Hello! What can I do for you?"),
    ("Thank you", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Thanks a lot", "You are welcome."),
    ("Who are you?", "I am a very small model that calls tools."),
    ("What are you?", "I am a very small model that calls tools."),
)
REPEAT = ("Say {text}.", "Repeat {text}.", "Say it after me: {text}.", "Please write {text}.", "Spell {text}.")
NO_TOOL = "I have no tool for that."

FIXED_VALUES: dict[str, Sequence[str]] = {
    "currency": words("euros dollars pounds yen francs kroner rupees pesos zloty lira won rand"),
    "room": words("kitchen bathroom bedroom office hall cellar garage attic library nursery"),
    "switch": ["on", "off"],
    "language": words("French German Spanish Italian Danish Polish Turkish Hindi Greek Dutch Czech Finnish"),
    "sky": words("sunny cloudy rainy snowy windy foggy clear stormy"),
    "sent": ["sent", "delivered"],
    "done": ["done", "ok"],
}
PLACES = words(
    "Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Warsaw Athens Dublin London Zürich Geneva Milan "
    "Naples Lyon Porto Seville Hamburg Munich Cologne Bergen Malmö Turin Gdansk Krakow Tallinn Riga "
    "Vilnius Helsinki Stockholm Tokyo Kyoto Osaka Seoul Beijing Delhi Mumbai Cairo Nairobi Lagos Dakar "
    "Lima Quito Bogotá Santiago Havana Toronto Boston Chicago Denver Seattle Austin Sydney Perth Auckland"
)
PEOPLE = words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jonas Karen Laura Martin Nora Oscar Paula Robert "
    "Sara Thomas Ursula Victor Walter Yara Zoe Priya Ahmed Chen Fatima Hiroshi Ingrid Maya Leo"
)
WORDS = words(
    "I we you they the a train dinner meeting cat dog house garden car bike book song late early ready "
    "here there home tomorrow today soon lost found new old red green blue cold warm will can must is are "
    "was has have be come leave bring buy find see milk bread water tea coffee keys ticket map letter "
    "rain snow wind sea river bridge school party good bad long short open closed small large round wild "
    "best first last free quiet loud happy tired"
)
