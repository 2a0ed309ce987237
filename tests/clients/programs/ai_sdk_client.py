"""Vercel's AI SDK under node: its providers for OpenAI (responses, chats), for compatible servers and for Anthropic."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, TEXTS, URL, WEATHER

SOURCE = Path(__file__).parent / "javascript" / "ai_sdk.mjs"
script = shutil.copy(SOURCE, sys.prefix)  # node looks for packages in the folder of the script
given = {"url": URL, "key": KEY, "model": CHAT, "hello": HELLO, "asked": ASKED, "result": RESULT, "answer": ANSWER}
given |= {"weather": WEATHER["description"], "texts": TEXTS}
# It prints the lines of {"feature": "chat"}, {"feature": "stream"}, {"feature": "tools"} and {"feature": "structured"},
# each with the provider, and of {"feature": "embeddings"}.
subprocess.run(["node", script, json.dumps(given)], check=True, timeout=200)
