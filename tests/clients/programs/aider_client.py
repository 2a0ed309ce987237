"""The command `aider`, which asks for a change of a file in a git repository."""

import os
import subprocess
import tempfile
from pathlib import Path

from features import KEY, URL, feature

PLAIN = ("--yes-always", "--no-check-update", "--no-show-release-notes", "--no-analytics", "--no-show-model-warnings")
QUIET = ("--no-pretty", "--no-gitignore", "--map-tokens", "0", "--no-detect-urls", "--no-auto-commits")


def aider(folder, *arguments):
    given = {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY}
    command = ["aider", "--model", "openai/chat", *PLAIN, *QUIET, *arguments]
    done = subprocess.run(command, env={**os.environ, **given}, cwd=folder, capture_output=True, text=True, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and " received." in said, said[-500:]
    return " ".join(said.split())[-150:]


with tempfile.TemporaryDirectory() as folder:
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    Path(folder, "greet.py").write_text("def greet():\n    return 'hello'\n")
    # Without a limit of its own a small model repeats itself until the context is full.
    Path(folder, ".aider.model.settings.yml").write_text(
        "- name: openai/chat\n  edit_format: whole\n  extra_params:\n    max_tokens: 60\n"
    )

    @feature("chat")
    def chat():
        return aider(folder, "--no-stream", "--chat-mode", "ask", "--message", "What does greet return?", "greet.py")

    @feature("stream")
    def stream():
        return aider(folder, "--chat-mode", "ask", "--message", "What does greet return?", "greet.py")
