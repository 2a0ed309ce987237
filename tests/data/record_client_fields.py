"""Records in client_fields.json which fields the newest cohere, ollama, sglang and vllm know, from unpacked wheels.

    python tests/data/record_client_fields.py cohere=FOLDER ollama=FOLDER sglang=FOLDER vllm=FOLDER

reads their sources without importing them. Types of openai, anthropic and huggingface_hub are read where they are
installed. Only names of fields are recorded.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

OUT = Path(__file__).with_name("client_fields.json")
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# package: file or folder: class or function: route, path of the field that it is
SOURCES: dict[str, dict[str, dict[str, tuple[str, str]]]] = {
    "sglang": {
        "sglang/srt/entrypoints/openai/protocol.py": {
            "ChatCompletionRequest": (CHAT, ""),
            "CompletionRequest": (COMPLETIONS, ""),
            "StreamOptions": (CHAT, "stream_options."),
            "ChatCompletionMessageGenericParam": (CHAT, "messages[]."),
            "ToolCall": (CHAT, "messages[].tool_calls[]."),
            "Tool": (CHAT, "tools[]."),
            "Function": (CHAT, "tools[].function."),
            "EmbeddingRequest": (EMBEDDINGS, ""),
            "ResponsesRequest": ("/v1/responses", ""),
            "ClassifyRequest": ("/v1/classify", ""),
            "V1RerankReqInput": ("/v1/rerank, /v2/rerank (Cohere, Jina, vLLM)", ""),
        },
    },
    "vllm": {
        "vllm/entrypoints": {
            "StreamOptions": (CHAT, "stream_options."),
            "EmbeddingCompletionRequest": (EMBEDDINGS, ""),
            "EmbeddingChatRequest": (EMBEDDINGS, ""),
            "ClassificationCompletionRequest": ("/v1/classify", ""),
            "ClassificationChatRequest": ("/v1/classify", ""),
            "RerankRequest": ("/v1/rerank, /v2/rerank (Cohere, Jina, vLLM)", ""),
            "ScoreDataRequest": ("/v1/score", ""),
            "ScoreQueriesDocumentsRequest": ("/v1/score", ""),
            "ScoreQueriesItemsRequest": ("/v1/score", ""),
            "ScoreTextRequest": ("/v1/score", ""),
            "CohereEmbedRequest": ("/v1/embed, /v2/embed (Cohere)", ""),
            "AnthropicMessagesRequest": ("/v1/messages", ""),
        },
        "vllm/entrypoints/openai/chat_completion/protocol.py": {
            "ChatCompletionRequest": (CHAT, ""),
            "ChatMessage": (CHAT, "messages[]."),
        },
        "vllm/entrypoints/openai/completion/protocol.py": {"CompletionRequest": (COMPLETIONS, "")},
        "vllm/sampling_params.py": {"StructuredOutputsParams": (CHAT, "structured_outputs.")},
    },
    "ollama": {
        "ollama/_types.py": {
            "ChatRequest": ("/api/chat", ""),
            "Message": ("/api/chat", "messages[]."),
            "Options": ("/api/chat", "options."),
            "GenerateRequest": ("/api/generate", ""),
            "EmbedRequest": ("/api/embed", ""),
            "EmbeddingsRequest": ("/api/embeddings", ""),
            "ShowRequest": ("/api/show", ""),
        },
    },
    "cohere": {
        "cohere/v2/raw_client.py": {
            "embed": ("/v1/embed, /v2/embed (Cohere)", ""),
            "rerank": ("/v1/rerank, /v2/rerank (Cohere, Jina, vLLM)", ""),
        },
        "cohere/raw_base_client.py": {
            "embed": ("/v1/embed, /v2/embed (Cohere)", ""),
            "rerank": ("/v1/rerank, /v2/rerank (Cohere, Jina, vLLM)", ""),
        },
    },
}
_NOT_SENT = {"self", "request_options"}


def main(folders: dict[str, Path]) -> None:
    found: dict[str, dict[str, list[str]]] = {}
    for package in SOURCES:
        [info] = folders[package].glob(f"{package}-*.dist-info")
        found[info.name.removesuffix(".dist-info").replace("-", " ")] = fields(package, folders[package])
    OUT.write_text(json.dumps({key: found[key] for key in sorted(found)}, indent=1) + "\n", encoding="utf-8")


def fields(package: str, root: Path) -> dict[str, list[str]]:
    """Return the paths of the fields that a package knows, by route; raises `KeyError` for a class that is gone."""
    found: dict[str, list[str]] = {}
    for file, names in SOURCES[package].items():
        definitions = _definitions(root / file)
        for name, (route, prefix) in names.items():
            paths = found.setdefault(route, [])
            paths += [path for one in _names(name, definitions) if (path := prefix + one) not in paths]
    return found


def _definitions(path: Path) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    trees = [ast.parse(one.read_text(encoding="utf-8")) for one in files]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: node for node in nodes}


def _names(name: str, definitions: dict[str, ast.ClassDef | ast.FunctionDef]) -> list[str]:
    """Return the fields of a class, with those of its bases, or the arguments of a function."""
    node = definitions[name]
    if isinstance(node, ast.FunctionDef):
        arguments = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
        return [one for one in arguments if one not in _NOT_SENT]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in definitions]
    found = [one for base in bases for one in _names(base, definitions)]
    own = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    return [*found, *(ast.unparse(one.target) for one in own if not _is_internal(one))]


def _is_internal(field: ast.AnnAssign) -> bool:
    assert isinstance(field.target, ast.Name)
    name, kind = field.target.id, ast.unparse(field.annotation)
    return name.startswith("_") or name in _NOT_SENT or kind.startswith("ClassVar")


if __name__ == "__main__":
    main({name: Path(folder) for name, _, folder in (argument.partition("=") for argument in sys.argv[1:])})
