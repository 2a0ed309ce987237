"""The clients of `make clients`, each with the versions that it is run in.

A client's program runs in an environment of its own, which holds `requirements` and what they require.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
COLUMNS = ("chat", "stream", "tools", "structured", "completion", "embeddings", "rerank", "audio", "other")
UV = "uv==0.13.9"  # makes the environments


@dataclass(frozen=True)
class Client:
    """A program that talks to the service with an unmodified client."""

    name: str
    program: str  # a file in programs/
    requirements: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # commands of the machine

    @property
    def title(self) -> str:
        """Return the name that the table of docs/api.md has, with the version."""
        return self.requirements[0].replace("==", " ") if self.requirements else self.name


CLIENTS = (
    Client("openai", "openai_client.py", ("openai==3.57.0",)),
    Client("openai-2", "openai_client.py", ("openai==2.54.0",)),
    Client("anthropic", "anthropic_client.py", ("anthropic==2.14.0",)),
    Client(
        "huggingface_hub", "huggingface_hub_client.py", ("huggingface_hub==2.4.0", "numpy==2.4.6", "aiohttp==3.14.5")
    ),
    Client(
        "huggingface_hub-0", "huggingface_hub_client.py", ("huggingface_hub==0.36.2", "numpy==2.4.6", "aiohttp==3.14.5")
    ),
)
