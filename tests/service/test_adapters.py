"""jina-embeddings-v3 with its adapters, in the layout of its first folder, against networks of merged matrices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import copied, prompt, saved
from tests.service.encode_models import TEXT, Client, client_of, encode_app, hf_tokenizer
from tests.service.test_bad_requests import check_error
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeOutput, EncodeRequest, EncodeTask, token_source
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.engine.builder import load
from triptych.model.engine.scheduling.scheduled_step import UNLIMITED, StepBudget
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.llm import LLM

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
PROMPTS = {**dict.fromkeys(TASKS, ""), "retrieval.query": "the cat on ", "retrieval.passage": "a mat "}
RANK, ALPHA = 3, 2
ENGINE = EngineConfig(device="cpu", dtype="float32")
# As the folder's own code writes it; sizes are the test's.
PUBLISHED = {
    "architectures": ["XLMRobertaModel"],
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    **dict(model_type="xlm-roberta", position_embedding_type="rotary", rotary_emb_base=20000.0, emb_pooler="mean"),
    **dict(lora_adaptations=TASKS, lora_rank=RANK, lora_alpha=ALPHA, lora_dropout_p=0.0),
    **dict(lora_main_params_trainable=False, load_trained_adapters=True, task_instructions=PROMPTS),
    **dict(matryoshka_dimensions=[8, 16], truncate_dim=None, use_flash_attn=True, use_reg_tokens=False),
}


def tables(state: dict[str, torch.Tensor]) -> list[str]:
    """The matrices that have adapters: all of the network's."""
    return [name.removesuffix(".weight") for name, tensor in state.items() if tensor.ndim == 2]


def write_folder(into: Path) -> tuple[Path, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return a folder, and what each task adds to each matrix as `A` and `B` of all tasks."""
    folder = copied("jina-v3", into)
    state, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    stored = {f"roberta.{name}": tensor for name, tensor in state.items() if tensor.ndim == 1}
    adapters = {}
    for name in tables(state):
        rows, columns = state[f"{name}.weight"].shape
        shapes = ((rows, RANK), (RANK, columns)) if "embeddings" in name else ((RANK, columns), (rows, RANK))
        adapters[name] = tuple(torch.randn(len(TASKS), *shape, generator=random) * 0.3 for shape in shapes)
        place = f"roberta.{name}.parametrizations.weight"
        stored |= {f"{place}.original": state[f"{name}.weight"].clone()}
        stored |= {f"{place}.0.lora_{part}": one for part, one in zip("AB", adapters[name], strict=True)}
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in raw.items() if name not in ("rope_parameters", "architectures")}
    (folder / "config.json").write_text(json.dumps(sizes | PUBLISHED))
    return folder, adapters  # type: ignore[return-value]


class Reference:
    """The network of each task, with its matrices merged in float32."""

    def __init__(self, folder: Path, adapters: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.folder = folder
        self._adapters = adapters
        self._networks = {None: saved("jina-v3").reference}

    def network(self, task: str | None) -> Any:
        if task not in self._networks:
            merged = copied("jina-v3", self.folder.parent / str(task))
            state = load_file(merged / "model.safetensors")
            for name, (first, second) in self._adapters.items():
                a, b = first[TASKS.index(str(task))], second[TASKS.index(str(task))]
                state[f"{name}.weight"] += (a @ b if "embeddings" in name else b @ a) * (ALPHA / RANK)
            save_file(state, merged / "model.safetensors", {"format": "pt"})
            self._networks[task] = transformers.JinaEmbeddingsV3Model.from_pretrained(merged).eval()
        return self._networks[task]

    def hidden(self, ids: list[int], task: str | None) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.network(task)(torch.tensor([ids])).last_hidden_state[0]
        return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(*write_folder(tmp_path_factory.mktemp("adapters")))


@pytest.mark.parametrize("budget", [UNLIMITED, StepBudget(whole_tokens=7)])
def test_inputs_of_different_tasks_share_a_batch(reference: Reference, budget: StepBudget) -> None:
    """Or are computed layer by layer, where there is no time for more."""
    encode = load(ModelSpec("jina", str(reference.folder), ENGINE)).encode
    chosen = [None, 0, 4, 1, 0, 2, 3, None]
    requests = [
        EncodeRequest(f"r{at}", "jina", token_source(prompt(9 + at, at)), EncodeTask.TOKENS, adapter=which)
        for at, which in enumerate(chosen)
    ]
    for request in requests:
        encode.add(request)
    found: dict[str, EncodeOutput] = {}
    steps = 0
    while encode.has_work:
        steps += 1
        found |= {output.request_id: output for output in encode.step(budget)[0]}
    assert steps == 1 or budget is not UNLIMITED
    plain = 0
    for request, which in zip(requests, chosen, strict=True):
        output = found[request.request_id]
        vectors = np.frombuffer(output.data, "<f4").reshape(output.shape)
        ids = list(request.source.token_ids)
        expected = reference.hidden(ids, None if which is None else TASKS[which]).numpy()
        np.testing.assert_allclose(vectors, expected, atol=1e-4)
        plain += np.abs(vectors - reference.hidden(ids, None).numpy()).max() < 1e-2
    assert plain == chosen.count(None)


def test_an_input_without_an_adapter_does_not_depend_on_others(reference: Reference) -> None:
    """Its layers run in C, as those of a batch without adapters do."""
    encode = load(ModelSpec("jina", str(reference.folder), EngineConfig(device="cpu", dtype="bfloat16"))).encode
    found = []
    for others in ([], [0, 4], [None, 2]):
        for at, which in enumerate([None, *others]):
            source = token_source(prompt(9 + at, at))
            encode.add(EncodeRequest(f"r{at}", "jina", source, EncodeTask.TOKENS, adapter=which))
        outputs, _ = encode.step()
        found.append(next(output.data for output in outputs if output.request_id == "r0"))
    assert found[1] == found[0] and found[2] == found[0]


@pytest.fixture(scope="module")
def client(reference: Reference) -> Iterator[Client]:
    app = encode_app("bert", jina=reference.folder)
    with client_of(app) as made:
        yield made


@pytest.mark.parametrize("task", [None, *TASKS])
@pytest.mark.parametrize("path", ["/encode", "/v1/embeddings"])
def test_a_task_has_its_adapter_and_its_prompt(
    client: Client, reference: Reference, path: str, task: str | None
) -> None:
    body = {"model": "jina", "input": TEXT, "normalize": False} | ({"task": task} if task else {})
    [item] = client.post(path, **body).json()["data"]
    ids = hf_tokenizer("bert")((PROMPTS[task] if task else "") + TEXT)["input_ids"]
    expected = reference.hidden(ids, task).mean(dim=0)
    np.testing.assert_allclose(item["embedding"], expected.numpy(), atol=1e-4)


def test_a_prompt_of_ones_own_and_parts_of_a_text(client: Client, reference: Reference) -> None:
    body = {"model": "jina", "input": ["Ada sat", "on a mat"], "task": "retrieval.query"}
    found = client.post("/v1/embeddings", **body, prompt_name="separation", late_chunking=True).json()["data"]
    states = reference.hidden(hf_tokenizer("bert")("Ada sat on a mat")["input_ids"], "retrieval.query")
    for one, rows in zip(found, (states[1:3], states[3:6]), strict=True):
        np.testing.assert_allclose(one["embedding"], rows.mean(dim=0).numpy(), atol=1e-4)


def test_from_python(reference: Reference) -> None:
    llm = LLM(reference.folder, ENGINE)
    ids = [4, 5, 6, 7]
    [vector] = llm.encode([ids], task="separation")
    np.testing.assert_allclose(vector, reference.hidden(ids, "separation").mean(dim=0).numpy(), atol=1e-4)
    with pytest.raises(ConfigError, match="no task 'x'; the model has retrieval"):
        llm.encode([ids], task="x")


def test_refusals_and_what_info_tells(client: Client) -> None:
    reply = client.post(model="jina", input="a", task="retrieval")
    message = check_error(reply, 400, "task", "invalid_value")["message"]
    assert message == f"task: model jina has no task 'retrieval'; it has {', '.join(TASKS)}"
    check_error(client.post(model="bert", input="a", task=TASKS[0]), 400, "task", "invalid_value")
    pooled = client.post(model="jina", input="a", task=TASKS[2], pooling="pooler")
    check_error(pooled, 400, "pooling", "invalid_value")
    shown = {one["name"]: one["adapters"] for one in client.get("/info").json()["models"]}
    assert shown == {"jina": TASKS, "bert": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_adaptations": None}, "lora_adaptations must name the adapters"),
        ({"lora_adaptations": [TASKS[0]] * 5}, "adapters need different names"),
        ({"lora_adaptations": TASKS[:4]}, r"expected matrices of adapters \[4, "),
        ({"lora_rank": 5}, r"expected matrices of adapters \[5, 97, 5\], found \[5, 97, 3\]"),
    ],
)
def test_adapters_that_do_not_fit_are_named(
    reference: Reference, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder, _ = write_folder(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(ModelSpec("jina", str(folder), ENGINE))


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["roberta.encoder.layers.1.mlp.fc2.parametrizations.weight.0.lora_B"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.fc2: expected .*, found None"):
        load(ModelSpec("jina", str(folder), ENGINE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tensor_parallel_size=2), "a model with adapters runs on one rank"),
        (dict(batch_invariant=True), "batch_invariant: the native kernels do not compute the adapters"),
    ],
)
def test_what_adapters_cannot_be_had_with(reference: Reference, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ModelSpec("jina", str(reference.folder), EngineConfig(device="cpu", dtype="float32", **settings)))
    assert read_checkpoint(reference.folder).config.model_type == "jina_embeddings_v3"
