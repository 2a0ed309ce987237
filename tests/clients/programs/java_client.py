"""The JDK's HttpClient, which offers HTTP/2 by an upgrade unless it is told not to."""

import os
import subprocess
from pathlib import Path

from features import HELLO, KEY, SAID, SAMPLE, URL

FOLDER = Path(os.environ["HOME"]) / "classes"
SOURCE = Path(__file__).parent / "java" / "Ask.java"
subprocess.run(["javac", "-d", str(FOLDER), str(SOURCE)], check=True)
# Ask prints the lines of each {"feature": "chat"}, {"feature": "stream"} and {"feature": "audio"}.
command = ["java", "-cp", str(FOLDER), "Ask", URL, KEY, HELLO, str(SAMPLE), SAID]
subprocess.run(command, check=True, timeout=120)
