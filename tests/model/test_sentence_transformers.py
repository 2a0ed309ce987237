"""Folders of sentence-transformers: their settings are read, and their vectors are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import checkpoints
from tests.model.checkpoints import MPNET, T5, copied, prompt, randomise, saved
from tests.model.tokenizer_folders import write_folder
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, EncodeTask, Pooling, token_source
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_transformers import SpladeSettings
from triptych.model.engine.builder import load
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.llm import LLM
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.planning.tokenization import truncate_text

SMALL = {"device": "cpu", "dtype": "float32"}
TEXTS = ["import os", "class Café: price = '12 €'", "for index in range(10): print(index)"]
PREFIX = "sentence_transformers.models."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.bert(tmp_path_factory.mktemp("sentences") / "bert")


def sentence_folder(
    plain: Path,
    into: Path,
    pooling: dict[str, Any],
    *modules: str,
    dense: dict[str, Any] | None = None,
    **files: dict[str, Any],
) -> Path:
    """Copy the encoder and add modules; `files` by name without .json."""
    into.mkdir()
    for file in plain.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    kinds = ["Transformer", "Pooling", *modules]
    listed = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": PREFIX + kind}
        for at, kind in enumerate(kinds)
    ]
    files |= {"modules": listed}  # type: ignore[dict-item]
    for name, content in files.items():
        (into / f"{name}.json").write_text(json.dumps(content))
    for at, kind in enumerate(kinds):
        if kind in ("Pooling", "Dense"):
            (into / f"{at}_{kind}").mkdir()
            (into / f"{at}_{kind}" / "config.json").write_text(json.dumps(pooling if kind == "Pooling" else dense))
    return into


def hidden_states(folder: Path, text: str) -> Tensor:
    """Return `[L, d]` by transformers."""
    model = transformers.AutoModel.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model(torch.tensor([tokens(folder, text)])).last_hidden_state[0]


def tokens(folder: Path, text: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer.encode(text).ids


def encoded(folder: Path, texts: list[str] = TEXTS, prompt_name: str | None = None) -> np.ndarray:
    return LLM(folder, EngineConfig(**SMALL)).encode(texts, prompt_name)


def assert_close(found: np.ndarray, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected.numpy()).max() < 1e-4


def weighted(h: Tensor) -> Tensor:
    weights = torch.arange(1, len(h) + 1)[:, None]
    return (h * weights).sum(0) / weights.sum()


MODES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "cls": ({"pooling_mode_cls_token": True}, lambda h: h[0]),
    "max": ({"pooling_mode_max_tokens": True}, lambda h: h.max(0).values),
    "mean": ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, lambda h: h.mean(0)),
    "mean_sqrt_len": ({"pooling_mode_mean_sqrt_len_tokens": True}, lambda h: h.sum(0) / len(h) ** 0.5),
    "weighted mean": ({"pooling_mode_weightedmean_tokens": True}, weighted),
    "last": ({"pooling_mode_lasttoken": True}, lambda h: h[-1]),
    "two": (
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        lambda h: torch.cat((h[0], h.mean(0))),
    ),
    "all off": ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False}, lambda h: h.mean(0)),
    "named": ({"pooling_mode": "max"}, lambda h: h.max(0).values),
    "named two": ({"pooling_mode": ["mean", "cls"]}, lambda h: torch.cat((h.mean(0), h[0]))),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_pooling_combines_tokens_as_it_is_defined(mode: str, plain: Path, tmp_path: Path) -> None:
    pooling, expected = MODES[mode]
    folder = sentence_folder(plain, tmp_path / "s", pooling, "Normalize")
    for text, found in zip(TEXTS, encoded(folder), strict=True):
        assert_close(found, torch.nn.functional.normalize(expected(hidden_states(folder, text)), dim=0))


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "GELU"])
@pytest.mark.parametrize("pickled", [False, True])
def test_projections_follow_the_pooling(activation: str, pickled: bool, plain: Path, tmp_path: Path) -> None:
    """EmbeddingGemma, LaBSE and GTR have such projections."""
    path = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
    dense = {"in_features": 32, "out_features": 20, "bias": True, "activation_function": path}
    folder = sentence_folder(plain, tmp_path / "s", MODES["mean"][0], "Dense", "Normalize", dense=dense)
    weight, bias = torch.randn(20, 32), torch.randn(20)
    state = {"linear.weight": weight, "linear.bias": bias}
    if pickled:
        torch.save(state, folder / "2_Dense" / "pytorch_model.bin")
    else:
        save_file(state, folder / "2_Dense" / "model.safetensors")
    assert LLM(folder, EngineConfig(**SMALL)).info.embedding_size == 20
    function = getattr(torch.nn, activation)()
    for text, found in zip(TEXTS, encoded(folder), strict=True):
        vector = function(weight @ hidden_states(folder, text).mean(0) + bias)
        assert_close(found, torch.nn.functional.normalize(vector, dim=0))


@pytest.mark.parametrize("included", [True, False])
def test_prompts_stand_in_front_of_texts(included: bool, plain: Path, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "import os: ", "document": "", "none": None}, "default_prompt_name": None}
    pooling = {**MODES["weighted mean"][0], "include_prompt": included}
    folder = sentence_folder(plain, tmp_path / "s", pooling, config_sentence_transformers=prompts)
    skipped = 0 if included else len(tokens(folder, "import os: ")) - 1  # [SEP] is not part of the prompt
    for text, found in zip(TEXTS, encoded(folder, prompt_name="query"), strict=True):
        hidden = hidden_states(folder, "import os: " + text)
        weights = torch.arange(1, len(hidden) + 1)[skipped:, None]
        assert_close(found, (hidden[skipped:] * weights).sum(0) / weights.sum())
    for name in (None, "document", "none"):  # no prompt, and an empty one
        assert_close(encoded(folder, prompt_name=name)[0], weighted(hidden_states(folder, TEXTS[0])))
    with pytest.raises(ConfigError, match="no prompt 'passage'; the model has query"):
        encoded(folder, prompt_name="passage")


def test_a_default_prompt_and_lower_case_apply_to_every_text(plain: Path, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Import OS: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    texts = {"max_seq_length": 40, "do_lower_case": True}
    folder = sentence_folder(
        plain, tmp_path / "s", MODES["mean"][0], config_sentence_transformers=prompts, sentence_bert_config=texts
    )
    settings = read_checkpoint(folder).sentences
    assert (settings.default_prompt, settings.similarity, settings.max_tokens) == ("query", "dot", 40)
    assert_close(encoded(folder, ["CLASS"])[0], hidden_states(folder, "import os: class").mean(0))


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("function", ["relu", "log1p_relu"])
def test_a_sparse_encoder_pools_the_logits_of_its_head(strategy: str, function: str, tmp_path: Path) -> None:
    folder = copied("bert-masked", tmp_path)
    modules = ["MLMTransformer", "SpladePooling"]
    listed = [{"path": f"{at}_{kind}" if at else "", "type": PREFIX + kind} for at, kind in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_SpladePooling").mkdir()
    settings = {"pooling_strategy": strategy, "activation_function": function, "word_embedding_dimension": 97}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    ids = prompt(40)
    with torch.inference_mode():
        found = saved("bert-masked").reference(torch.tensor([ids])).logits[0].relu().log1p()
    found = found.log1p() if function == "log1p_relu" else found
    expected = found.amax(dim=0) if strategy == "max" else found.sum(dim=0)
    engine = load(ModelSpec("m", str(folder), EngineConfig(device="cpu", dtype="float32"))).encode
    engine.add(EncodeRequest("r", "m", token_source(ids), EncodeTask.SPARSE))
    [output], _ = engine.step()
    assert np.frombuffer(output.indices, "<i4").tolist() == expected.nonzero().flatten().tolist()
    assert np.allclose(np.frombuffer(output.data, "<f4"), expected[expected > 0], atol=1e-4)


def test_the_length_may_be_the_tokenizers(plain: Path, tmp_path: Path) -> None:
    """sentence-transformers 6 stores it there; without modules, or if it is no number, there is no bound."""

    def length(**files: dict[str, Any]) -> int | None:
        folder = sentence_folder(plain, tmp_path / str(len(list(tmp_path.iterdir()))), MODES["mean"][0], **files)
        return read_checkpoint(folder).sentences.max_tokens

    assert length(tokenizer_config={"model_max_length": 7}) == 7
    assert length(tokenizer_config={"model_max_length": 7}, sentence_bert_config={"max_seq_length": 5}) == 5
    assert length(tokenizer_config={"model_max_length": 10**30}) is None
    text = {"processing_kwargs": {"text": {"max_length": 6}}, "max_seq_length": 9}
    assert length(sentence_bert_config=text) == 6
    (plain / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    try:
        assert read_checkpoint(plain).sentences.max_tokens is None
    finally:
        (plain / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("name", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_settings_of_the_network_may_have_the_name_of_its_type(name: str, plain: Path, tmp_path: Path) -> None:
    """So it is in folders of the first versions; the file that later versions write holds where both are there."""
    settings = {"max_seq_length": 12, "do_lower_case": True, "colour": "red"}
    folder = sentence_folder(plain, tmp_path / "s", MODES["mean"][0], **{f"sentence_{name}_config": settings})
    found = read_checkpoint(folder).sentences
    assert (found.max_tokens, found.lower_case) == (12, True)
    assert found.warnings == (f"sentence_{name}_config.json: keys that are not applied: colour",)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    found = read_checkpoint(folder).sentences
    assert (found.max_tokens, found.lower_case) == (7, False)


def test_arguments_of_the_tokenizer_are_applied_or_told(plain: Path, tmp_path: Path) -> None:
    arguments = {"text": {"add_special_tokens": True, "stride": 3}, "common": {"add_special_tokens": False}}
    arguments["text"] |= {"padding": "max_length", "truncation": False}
    settings = {"processing_kwargs": arguments, **_text("forward", "last_hidden_state")}
    folder = sentence_folder(plain, tmp_path / "s", MODES["mean"][0], sentence_bert_config=settings)
    assert read_checkpoint(folder).sentences.warnings == (
        "sentence_bert_config.json: processing_kwargs that are not applied: stride, truncation",
    )
    tokenizer, network = Tokenizer.from_folder(plain), transformers.AutoModel.from_pretrained(plain).float().eval()
    assert tokenizer is not None
    for text, found in zip(TEXTS, encoded(folder), strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids != tokenizer.encode(text).ids
        with torch.no_grad():
            assert_close(found, network(torch.tensor([ids])).last_hidden_state[0].mean(0))


def test_a_sparse_encoder_of_version_6_is_told_by_its_task(plain: Path, tmp_path: Path) -> None:
    folder = sentence_folder(
        plain, tmp_path / "s", MODES["mean"][0], sentence_bert_config={"transformer_task": "fill-mask"}
    )
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.sparse_encoder.SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    settings = {"pooling_strategy": "sum", "activation_function": "log1p_relu"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert read_checkpoint(folder).sentences.splade == SpladeSettings(sums=True, twice=True)


@pytest.mark.parametrize("kind", ["mpnet", "modernbert", "eurobert", "nomic-bert", "gte", "jina-v3"])
def test_other_encoders_are_pooled_likewise(kind: str, tmp_path: Path) -> None:
    texts = [prompt(length) for length in (17, 5)]
    with torch.no_grad():
        hidden = [saved(kind).reference(torch.tensor([ids])).last_hidden_state[0] for ids in texts]
    for mode in ("cls", "mean"):
        pooling, expected = MODES[mode]
        llm = LLM(sentence_folder(saved(kind).path, tmp_path / mode, pooling, "Normalize"), EngineConfig(**SMALL))
        for found, one in zip(llm.encode(texts), hidden, strict=True):
            assert_close(found, torch.nn.functional.normalize(expected(one), dim=0))


def _text(method: str, output: object) -> dict[str, Any]:
    """Return what a folder of sentence-transformers 6 says of what the network returns of texts."""
    return {"modality_config": {"text": {"method": method, "method_output_name": output}}}


def test_a_folder_without_modules_pools_by_its_form(plain: Path) -> None:
    assert read_checkpoint(plain).sentences.pooling == (Pooling.MEAN,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": {"pooling_mode_median_tokens": True}}, "pooling must be one or more of .*, found median"),
        ({"pooling": {"pooling_mode": []}}, "found none"),
        ({"modules": ["Pooling"]}, "order Transformer, Pooling, Pooling; served are"),
        ({"modules": ["LSTM"]}, r"modules\.json has LSTM \(a recurrent network over .*\); served are"),
        ({"modules": ["SpladePooling"]}, "must have MLMTransformer, SpladePooling, has Transformer, Pooling"),
        ({"dense": {"in_features": 31, "out_features": 4}}, "in_features must be 32, found 31"),
        (
            {"dense": {"in_features": 32, "out_features": 4, "activation_function": "my.Own"}},
            "activation 'my.Own' is not served",
        ),
        ({"dense": {"in_features": 32, "out_features": 4, "module_input_name": "token_embeddings"}}, "not served"),
        ({"dense": {"in_features": 32, "out_features": 4}}, r"no model\.safetensors and no pytorch_model\.bin"),
        ({"dense": {"out_features": 4}}, r"a module's config\.json is malformed"),
        ({"sentence_bert_config": {"transformer_task": "any-to-any"}}, "transformer_task 'any-to-any' is not served"),
        ({"sentence_bert_config": _text("forward", ["hidden_states", -2])}, r"\[.hidden_states., -2\] of .forward.,"),
        ({"sentence_bert_config": _text("forward", "pooler_output")}, "served is .last_hidden_state. of forward"),
        ({"sentence_bert_config": _text("get_text_features", "pooler_output")}, ".pooler_output. of .get_text_feat"),
        ({"sentence_bert_config": {"processing_kwargs": {"text": {"max_length": "8"}}}}, "max_length must be a whole"),
        ({"sentence_bert_config": {"processing_kwargs": {"text": {"add_special_tokens": 0}}}}, "must be true or false"),
        ({"config_sentence_transformers": {"default_prompt_name": "x"}}, "'x' is none of its prompts"),
        ({"sentence_bert_config": {"max_seq_length": "8"}}, r"bert_config\.json: max_seq_length must be .*, found '8'"),
        ({"config_sentence_transformers": {"prompts": {"query": 3}}}, r"mers\.json: prompts must be texts by name, fo"),
        ({"config_sentence_transformers": {"prompts": ["query"]}}, r"prompts must be texts by name, found \['query'\]"),
    ],
)
def test_what_is_not_served_is_named(change: dict[str, Any], message: str, plain: Path, tmp_path: Path) -> None:
    pooling = change.pop("pooling", MODES["mean"][0])
    modules = change.pop("modules", ["Dense"] if "dense" in change else [])
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(sentence_folder(plain, tmp_path / "s", pooling, *modules, **change))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"query_maxlen": 10**9}, "the length of a query must be 4 to 65536 tokens, found 1000000000"),
        ({"query_maxlen": 65}, "queries have 65 tokens, more than the 64 that the model takes"),
        ({"query_maxlen": "32"}, "the length of a query must be .* found '32'"),
        ({"doc_maxlen": 0}, "the length of a document must be .* found 0"),
        ({"query_token_id": 5}, "prefixes and skipped words of late interaction must be texts"),
    ],
)
def test_settings_of_late_interaction_are_bounded(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Queries are padded to their length: a folder could ask for any memory, or for positions that do not exist."""
    folder = copied("bert", tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file(state | {"linear.weight": torch.randn(7, 32)}, folder / "model.safetensors")
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(folder)
    (folder / "artifact.metadata").write_text(json.dumps({"doc_maxlen": 300}))
    late = read_checkpoint(folder).sentences.late
    assert late is not None and (late.query_length, late.document_length) == (32, 64)


def test_a_pickled_projection_is_refused_where_none_is_to_be_read(plain: Path, tmp_path: Path) -> None:
    dense = {"in_features": 32, "out_features": 20, "bias": False}
    folder = sentence_folder(plain, tmp_path / "s", MODES["mean"][0], "Dense", dense=dense)
    torch.save({"linear.weight": torch.randn(20, 32)}, folder / "2_Dense" / "pytorch_model.bin")
    assert read_checkpoint(folder).sentences.steps[0].weights.name == "pytorch_model.bin"
    with pytest.raises(ConfigError, match=r"2_Dense: no model\.safetensors; --no-pickle refuses"):
        read_checkpoint(folder, pickle=False)


def test_a_projection_whose_tensors_do_not_fit_is_refused(plain: Path, tmp_path: Path) -> None:
    dense = {"in_features": 32, "out_features": 20, "bias": False}
    folder = sentence_folder(plain, tmp_path / "s", MODES["mean"][0], "Dense", dense=dense)
    save_file({"linear.weight": torch.randn(20, 31)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors: expected"):
        encoded(folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the first all-mpnet-base-v2: weights in `.bin`, vocab.txt, and a tokenizer equal to ours."""
    folder = write_folder("mpnet", tmp_path_factory.mktemp("published") / "mpnet")
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    model = transformers.MPNetModel(transformers.MPNetConfig(**{**MPNET, "vocab_size": size}))
    randomise(model)
    model.config.architectures = ["MPNetModel"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.slow
class TestPackage:
    """Comparison with sentence-transformers, which the lock leaves out: scipy and scikit-learn would take 200 MB."""

    library = staticmethod(
        lambda: pytest.importorskip(
            "sentence_transformers",
            reason="sentence-transformers is not in the lock: pip install it, with scipy and scikit-learn",
        )
    )

    def compare(self, folder: Path, texts: list[str] = TEXTS, prompt_names: Sequence[str | None] = (None,)) -> None:
        theirs, ours = self.library().SentenceTransformer(str(folder), device="cpu"), LLM(folder, EngineConfig(**SMALL))
        for name in prompt_names:
            assert_close(ours.encode(texts, name), torch.tensor(theirs.encode(texts, prompt_name=name)))

    @pytest.mark.parametrize("included", [True, False])
    @pytest.mark.parametrize("mode", MODES)
    def test_poolings_and_prompts(self, mode: str, included: bool, published: Path, tmp_path: Path) -> None:
        prompts = {"prompts": {"query": "import os: ", "document": ""}, "default_prompt_name": "query"}
        pooling = {"word_embedding_dimension": 32, **MODES[mode][0], "include_prompt": included}
        for modules in ([], ["Normalize"]):
            folder = tmp_path / str(len(modules))
            sentence_folder(published, folder, pooling, *modules, config_sentence_transformers=prompts)
            self.compare(folder, prompt_names=(None, "query", "document"))

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("activation", ["Identity", "Tanh", "GELU", "ReLU", "SiLU"])
    def test_projections(self, activation: str, bias: bool, published: Path, tmp_path: Path) -> None:
        path = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
        dense = {"in_features": 32, "out_features": 20, "bias": bias, "activation_function": path}
        pooling = {"word_embedding_dimension": 32, **MODES["mean"][0]}
        folder = sentence_folder(published, tmp_path / "s", pooling, "Dense", "Normalize", dense=dense)
        state = {"linear.weight": torch.randn(20, 32)} | ({"linear.bias": torch.randn(20)} if bias else {})
        torch.save(state, folder / "2_Dense" / "pytorch_model.bin")
        self.compare(folder)

    def test_a_published_gtr(self, tmp_path: Path) -> None:
        """T5's encoder, SentencePiece, a projection without bias, all weights pickled."""
        plain = write_folder("t5", tmp_path / "t5")
        size = len(transformers.AutoTokenizer.from_pretrained(plain))
        model = transformers.T5EncoderModel(transformers.T5Config(**{**T5, "vocab_size": size}))
        randomise(model, std=0.2)
        model.config.architectures = ["T5EncoderModel"]
        model.config.save_pretrained(plain)
        torch.save(model.state_dict(), plain / "pytorch_model.bin")
        dense = {"in_features": 32, "out_features": 24, "bias": False}
        dense["activation_function"] = "torch.nn.modules.linear.Identity"
        limits = {"max_seq_length": 30, "do_lower_case": False}
        pooling = {"word_embedding_dimension": 32, **MODES["mean"][0]}
        folder = tmp_path / "gtr"
        sentence_folder(plain, folder, pooling, "Dense", "Normalize", dense=dense, sentence_bert_config=limits)
        torch.save({"linear.weight": torch.randn(24, 32)}, folder / "2_Dense" / "pytorch_model.bin")
        self.compare(folder)

    def test_truncation_and_lower_case(self, published: Path, tmp_path: Path) -> None:
        pooling = {"word_embedding_dimension": 32, **MODES["last"][0]}
        limits = {"max_seq_length": 9, "do_lower_case": False}
        folder = sentence_folder(published, tmp_path / "s", pooling, sentence_bert_config=limits)
        theirs, ours = self.library().SentenceTransformer(str(folder), device="cpu"), LLM(folder, EngineConfig(**SMALL))
        assert ours.tokenizer is not None
        for text in (TEXTS[1], TEXTS[2] * 3):
            encoded = ours.tokenizer.encode(text)
            assert len(encoded.ids) > 9
            cut = truncate_text(ours.tokenizer, text, None, encoded, 9, "right").ids
            assert_close(ours.encode([cut]), torch.tensor(theirs.encode([text])))

    @pytest.mark.parametrize(
        ("pooling", "files"),
        [
            (MODES["all off"][0], {}),
            (MODES["mean"][0], {"sentence_roberta_config": {"max_seq_length": 60, "do_lower_case": True}}),
            (
                MODES["mean"][0],
                {"sentence_bert_config": {"processing_kwargs": {"text": {"add_special_tokens": False}}}},
            ),
            (
                MODES["mean"][0],
                {
                    "sentence_bert_config": _text("forward", "last_hidden_state")
                    | {"module_output_name": "token_embeddings"}
                },
            ),
        ],
    )
    def test_what_older_and_newer_folders_say(
        self, pooling: dict[str, Any], files: dict[str, Any], published: Path, tmp_path: Path
    ) -> None:
        self.compare(sentence_folder(published, tmp_path / "s", {"word_embedding_dimension": 32, **pooling}, **files))

    def test_folders_that_the_package_writes(self, published: Path, tmp_path: Path) -> None:
        library = self.library()
        parts = library.sentence_transformer.modules
        first = parts.Transformer(str(published), max_seq_length=40)
        prompts = {"query": "import os: "}
        for place, mode in enumerate(["mean", "lasttoken", ("cls", "weightedmean")]):
            pooling = parts.Pooling(32, pooling_mode=mode, include_prompt=False)
            dense = parts.Dense(pooling.pooling_output_dimension, 20, activation_function=torch.nn.GELU())
            made = library.SentenceTransformer(
                modules=[first, pooling, dense, parts.Normalize()], prompts=prompts, device="cpu"
            )
            made.save(str(tmp_path / str(place)))
            self.compare(tmp_path / str(place), prompt_names=(None, "query"))
            assert read_checkpoint(tmp_path / str(place)).sentences.max_tokens == 40
