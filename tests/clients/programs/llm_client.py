"""The command `llm`, with models of `extra-openai-models.yaml`."""

import json
import os
import subprocess
from pathlib import Path

from features import ANSWER, ASKED, CHAT, CITY, HELLO, KEY, RESULT, URL, expect, expect_city, feature

FOLDER = Path(os.environ["HOME"]) / "llm"
FOLDER.mkdir(exist_ok=True)
MODELS = [
    {
        "model_id": name,
        "model_name": name,
        "api_base": f"{URL}/v1",
        "api_key_name": "triptych",
        "supports_schema": True,
        "supports_tools": True,
    }
    for name in (CHAT, "chat")
]
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS))  # JSON is YAML


def llm(*arguments):
    environment = {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    command = ["llm", *arguments, "--key", KEY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-400:]
    return done.stdout.strip()


@feature("chat")
def chat():
    return expect(llm("-m", CHAT, "--no-stream", "-o", "temperature", "0", "Hello"), HELLO)


@feature("stream")
def stream():
    return expect(llm("-m", CHAT, "-o", "temperature", "0", "Hello"), HELLO)


@feature("tools")
def tools():
    function = f"def get_weather(city: str) -> str:\n    'Tells the weather.'\n    return {RESULT!r}"
    found = llm("-m", CHAT, "--functions", function, "-o", "temperature", "0", ASKED)
    return expect(found, ANSWER)


@feature("structured")
def structured():
    asked = ("--schema", json.dumps(CITY), "-o", "max_tokens", "100", "Three days in Oslo, as JSON")
    return expect_city(llm("-m", "chat", *asked))
