"""Rerankers made of language models, through HTTP, from folders as sentence-transformers 6 writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints import byte_level_bpe, save
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import BERT, LLAMA
from tests.service.encode_models import TEXT, Client, client_of, raw_tokenizer
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_transformers import MessageSettings
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.errors import ConfigError
from triptych.service.app import create_app
from triptych.service.core.models import Models
from triptych.service.core.pair_template import PairTemplate
from triptych.service.runtimes.model_reader import read_model
from triptych.service.settings.service_settings import ServiceSettings

ENGINE = EngineConfig(kv_cache_memory=1 << 20, device="cpu", dtype="float32")
QUERY = "  where is the café? "
DOCUMENTS = [
    "import os",
    "class Café:\n    price = '12 €'\n",
    "\nfor index in range(10):\n    print(index, 日本)\n" * 3,
]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_OF = "{{{{ messages | selectattr('role', 'eq', '{0}') | map(attribute='content') | first }}}}"
QWEN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements.<|im_end|>\n<|im_start|>user\n"
    f"<Instruct>: {_OF.format('system')}\n<Query>: {_OF.format('query')}\n"
    f"<Document>: {_OF.format('document')}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
ZERANK = (
    "{% for one in messages %}<|im_start|>{{ 'system' if one.role == 'query' else 'user' }}\n"
    "{{ one.content[0].text | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A folder: the network, the tokens of its score, its template and what stands in front of the two texts."""

    architecture: str
    settings: dict[str, Any]
    tokens: dict[str, int | None]
    template: str
    prompt: str = ""
    structured: bool = False
    variables: tuple[str, ...] = ()  # true ones

    def messages(self, query: str, document: str) -> list[dict[str, Any]]:
        said = {"system": self.prompt, "query": query, "document": document}
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if self.structured else text}
            for role, text in said.items()
            if text
        ]


KINDS = {
    "qwen3-reranker": Kind(
        "Qwen3ForCausalLM",
        {"head_dim": 12, "tie_word_embeddings": True},
        {"true_token_id": 77, "false_token_id": 101},
        QWEN,
        INSTRUCTION,
    ),
    "zerank": Kind(
        "LlamaForCausalLM",
        {},
        {"true_token_id": 300, "false_token_id": None},
        ZERANK,
        structured=True,
        variables=("add_generation_prompt",),
    ),
}


def write_folder(name: str, into: Path) -> Path:
    kind, tokenizer = KINDS[name], byte_level_bpe(vocab_size=320)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    model_class = getattr(transformers, kind.architecture)
    sizes = {**LLAMA, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, **kind.settings}
    folder = save(model_class, model_class.config_class(**sizes), tokenizer, into / name)
    (folder / "chat_template.jinja").write_text(kind.template)
    package = "sentence_transformers."
    modules = [
        ("", "base.modules.transformer.Transformer"),
        ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore"),
    ]
    text = {"method": "forward", "method_output_name": "logits"}
    files: dict[str, Any] = {
        "modules": [
            {"idx": at, "name": str(at), "path": path, "type": package + one} for at, (path, one) in enumerate(modules)
        ],
        "1_LogitScore/config": kind.tokens,
        "sentence_bert_config": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": text,
                "message": {**text, "format": "structured" if kind.structured else "flat"},
            },
            "module_output_name": "causal_logits",
            "processing_kwargs": {"chat_template": dict.fromkeys(kind.variables, True)},
        },
        "config_sentence_transformers": {
            "model_type": "CrossEncoder",
            "prompts": {"web": kind.prompt} if kind.prompt else {},
            "default_prompt_name": "web" if kind.prompt else None,
        },
    }
    (folder / "1_LogitScore").mkdir()
    for path, content in files.items():
        (folder / f"{path}.json").write_text(json.dumps(content))
    return folder


# Cross-encoders as they are published: a classifier of one label, no modules.json, and what config.json says of scores.
_TORCH = "torch.nn.modules."
CROSS: dict[str, dict[str, Any]] = {
    "bge": {},
    "ms-marco": {"sentence_transformers": {"activation_fn": f"{_TORCH}linear.Identity", "version": "4.1.0.dev0"}},
    "ms-marco-old": {"sbert_ce_default_activation_function": f"{_TORCH}linear.Identity"},
    "stsb": {"sentence_transformers": {"activation_fn": f"{_TORCH}activation.Sigmoid", "version": "4.1.0.dev0"}},
}


def write_cross_encoder(name: str, into: Path) -> Path:
    model_class = transformers.BertForSequenceClassification
    folder = save(model_class, model_class.config_class(**BERT, num_labels=1), raw_tokenizer(), into / name)
    config = json.loads((folder / "config.json").read_text()) | CROSS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rerankers")
    cross = {name: write_cross_encoder(name, root) for name in CROSS}
    return {name: write_folder(name, root) for name in KINDS} | cross


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[Client]:
    specs = [ModelSpec(name, str(folder), ENGINE) for name, folder in folders.items()]
    served = [read_model(spec) for spec in specs]
    tokenizers = {one.name: one.tokenizer for one in served}
    app = create_app(AsyncEngine(specs, ThreadTransport, tokenizers), Models(served), ServiceSettings())
    with client_of(app) as made:
        yield made


def rendered(folder: Path, document: str) -> list[int]:
    """The ids of a pair, by transformers."""
    kind = KINDS[folder.name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    variables = dict.fromkeys(kind.variables, True)
    messages = kind.messages(QUERY, document)
    text = tokenizer.apply_chat_template(messages, chat_template=kind.template, tokenize=False, **variables)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def score(folder: Path, ids: list[int]) -> float:
    kind = KINDS[folder.name]
    model = getattr(transformers, kind.architecture).from_pretrained(folder).float().eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    against = kind.tokens["false_token_id"]
    return float(logits[kind.tokens["true_token_id"]] - (0.0 if against is None else logits[against]))


@pytest.mark.parametrize("name", KINDS)
def test_pairs_are_scored_by_the_logits_of_tokens(client: Client, folders: dict[str, Path], name: str) -> None:
    expected = torch.tensor([score(folders[name], rendered(folders[name], one)) for one in DOCUMENTS])
    pairs = [{"text": QUERY, "text_pair": one} for one in DOCUMENTS]
    reply = client.encode(model=name, input=pairs, output="logits")
    assert reply["labels"] == ["relevance"]
    found = torch.tensor([item["scores"] for item in reply["data"]])[:, 0]
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.1
    ranked = client.post("/rerank", model=name, query=QUERY, texts=DOCUMENTS).json()
    assert [one["index"] for one in ranked] == expected.argsort(descending=True).tolist()
    for one in ranked:
        assert one["score"] == pytest.approx(float(expected[one["index"]].sigmoid()), abs=1e-5)
    cohere = client.post("/v1/rerank", model=name, query=QUERY, documents=DOCUMENTS).json()["results"]
    assert [one["index"] for one in cohere] == [one["index"] for one in ranked]
    assert cohere[0]["relevance_score"] == pytest.approx(ranked[0]["score"], abs=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_long_document_loses_its_end_and_not_what_stands_behind_it(
    client: Client, folders: dict[str, Path], name: str
) -> None:
    document = DOCUMENTS[2] * 60
    ids, empty = rendered(folders[name], document), rendered(folders[name], "Z")
    tail = next(n for n in range(1, len(empty)) if empty[-n:] != ids[-n:]) - 1
    assert len(ids) > 512 and tail > 2
    expected = score(folders[name], [*ids[: 512 - tail], *ids[len(ids) - tail :]])
    body = dict(model=name, input=[{"text": QUERY, "text_pair": document}], output="logits")
    [item] = client.encode(**body, truncate="right")["data"]
    assert item["truncated"]
    assert item["scores"][0] == pytest.approx(expected, abs=1e-4)
    refused = client.post(**body, truncate="left")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate")


@pytest.mark.parametrize("name", CROSS)
def test_a_cross_encoder_without_modules(client: Client, folders: dict[str, Path], name: str) -> None:
    """Scores are those of `CrossEncoder.predict` on every route; logits only where they are asked for."""
    query, texts = "the cat", [TEXT, "a mat", "Ada Lovelace in London"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[name])
    model = transformers.BertForSequenceClassification.from_pretrained(folders[name]).eval()
    logits = []
    for text in texts:
        encoded = tokenizer(query, text, return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            logits.append(float(model(**encoded).logits))
    scores = logits if name.startswith("ms-marco") else torch.tensor(logits).sigmoid().tolist()
    order = sorted(range(3), key=lambda at: -scores[at])
    assert max(scores) - min(scores) > 1e-3
    found = client.post("/v1/score", model=name, text_1=query, text_2=texts).json()["data"]
    assert [one["score"] for one in found] == pytest.approx(scores, abs=1e-4)
    ranked = client.post("/v2/rerank", model=name, query=query, documents=texts).json()["results"]
    assert [one["index"] for one in ranked] == order
    assert [one["relevance_score"] for one in ranked] == pytest.approx([scores[at] for at in order], abs=1e-4)
    for raw, expected in ((True, logits), (False, scores)):
        tei = client.post("/rerank", model=name, query=query, texts=texts, raw_scores=raw).json()
        assert [one["score"] for one in tei] == pytest.approx([expected[at] for at in order], abs=1e-4)


def test_an_activation_that_is_not_served_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["bge"], tmp_path / "odd"))
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "my.own.Softplus"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="Softplus' is not served"):
        read_checkpoint(folder)


def test_a_single_text_is_refused(client: Client) -> None:
    reply = client.post(model="zerank", input="import os", output="logits")
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "input: model zerank scores pairs: send text and text_pair"


def test_a_reranker_generates_nothing_and_keeps_two_rows_of_its_head(folders: dict[str, Path]) -> None:
    config = read_checkpoint(folders["zerank"]).config
    assert not config.can_generate
    assert config.classifier is not None and config.classifier.tokens == (300,)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", "must have the query and then the document"),
        ("{{ messages[1].content }}{{ messages[0].content }}", "must have the query and then the document"),
        ("{{ messages[0].content }}{{ messages[1].content | e }}", "changes the texts"),
        ("{{ messages[0].content.x.y }}", "does not render a pair"),
    ],
)
def test_a_template_that_does_not_hold_pairs_is_refused(template: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=message):
        PairTemplate.from_folder(tmp_path, MessageSettings(), "")


def test_a_folder_without_its_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        PairTemplate.from_folder(tmp_path, MessageSettings(), "")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("1_LogitScore/config", {"true_token_id": 5000}, "outside the vocabulary"),
        ("1_LogitScore/config", {"true_token_id": "yes"}, "true_token_id and false_token_id must be token ids"),
        ("1_LogitScore/config", {"module_input_name": "scores"}, "'scores' is not served"),
        ("sentence_bert_config", {"transformer_task": "feature-extraction"}, "'logits' of 'forward', not served"),
        ("sentence_bert_config", {"transformer_task": "feature-extraction", "modality_config": {}}, "LogitScore"),
        ("sentence_bert_config", {"modality_config": {"message": {"format": "xml"}}}, "'xml' are not served"),
    ],
)
def test_settings_that_are_not_served_are_named(
    file: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder("zerank", tmp_path)
    path = folder / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(folder)
