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
    npm: tuple[str, ...] = ()  # packages of npm, in node_modules of the environment
    needs: tuple[str, ...] = ()  # commands of the machine
    debian: tuple[str, ...] = ()  # packages, each with a command of its name, that are unpacked where it is missing
    torch: bool = False  # its torch is the one that runs this, as PyPI's brings gigabytes for GPUs

    @property
    def title(self) -> str:
        """Return the name that the table of docs/api.md has, with the version."""
        if self.npm:
            return self.npm[0].replace("@", " ")
        package, _, version = self.requirements[0].partition("==") if self.requirements else (self.name, "", "")
        return f"{package.partition('[')[0]} {version}".strip()


_ARRAYS = ("numpy==2.4.6", "aiohttp==3.14.5")  # which huggingface_hub wants for vectors and for its asynchronous client
_TORCH_NEEDS = ("jinja2==3.1.6", "sympy==1.14.0", "networkx==3.6.1")

CLIENTS = (
    Client("openai", "openai_client.py", ("openai==3.57.0",)),
    Client("openai-2", "openai_client.py", ("openai==2.54.0",)),
    Client("anthropic", "anthropic_client.py", ("anthropic==2.14.0",)),
    Client("huggingface_hub", "huggingface_hub_client.py", ("huggingface_hub==2.4.0", *_ARRAYS)),
    Client("huggingface_hub-0", "huggingface_hub_client.py", ("huggingface_hub==0.36.2", *_ARRAYS)),
    Client("cohere", "cohere_client.py", ("cohere==7.3.1",)),
    Client("ollama", "ollama_client.py", ("ollama==0.6.3",)),
    Client("litellm", "litellm_client.py", ("litellm==1.110.2",)),
    Client("langchain-openai", "langchain_openai_client.py", ("langchain-openai==1.7.4",)),
    Client("langchain-anthropic", "langchain_anthropic_client.py", ("langchain-anthropic==1.7.10",)),
    Client("langchain-ollama", "langchain_ollama_client.py", ("langchain-ollama==1.1.0",)),
    Client(
        "langchain-huggingface", "langchain_huggingface_client.py", ("langchain-huggingface==1.2.3", "numpy==2.4.6")
    ),
    Client(
        "llama-index",
        "llama_index_client.py",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
    ),
    Client("pydantic-ai", "pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    Client("instructor", "instructor_client.py", ("instructor==1.17.0",)),
    Client("openai-agents", "openai_agents_client.py", ("openai-agents==0.24.0",)),
    Client(
        "ai-sdk",
        "ai_sdk_client.py",
        npm=(
            "ai@6.0.326",
            "@ai-sdk/openai@3.0.141",
            "@ai-sdk/openai-compatible@2.0.92",
            "@ai-sdk/anthropic@3.0.140",
            "zod@4.6.7",
        ),
        needs=("node", "npm"),
    ),
    Client("llm", "llm_client.py", ("llm==0.36",)),
    Client("aider", "aider_client.py", ("aider-chat==0.86.2",), needs=("git",)),
    Client("guidellm", "guidellm_client.py", ("guidellm==0.8.1", *_TORCH_NEEDS), torch=True),
    Client("aiperf", "aiperf_client.py", ("aiperf==0.13.0",)),
    Client("curl-http2", "curl_client.py", needs=("curl",)),
    Client("nginx", "nginx_client.py", debian=("nginx",)),
    Client("jdk-httpclient", "java_client.py", needs=("java", "javac")),
)
