"""The encode engine: correct vectors in any batch, batches within the budget, exactly one end for each input."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.checkpoints import CPU, DECODERS, loaded, prompt, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import (
    EncodeOutput,
    EncodeRequest,
    EncodeTask,
    FinishReason,
    Pooling,
    image_source,
    token_source,
)
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.engine import encode_results, output_heads
from triptych.model.engine.builder import load
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.output_heads import SentenceHead
from triptych.model.engine.scheduling.scheduled_step import StepBudget, StepDemand
from triptych.model.network.inputs import packed_input
from triptych.model.network.stack import StackPass
from triptych.model.system import devices

LENGTHS = (5, 30, 1, 12, 5, 22)


def engine(
    kind: str = "bert", *, budget: int = 64, seqs: int = 8, normalize: bool = False, overlap: bool = False
) -> EncodeEngine:
    pooling = Pooling.LAST if kind.startswith("llama") else Pooling.MEAN
    return EncodeEngine(
        kind,
        loaded(kind),
        CPU,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        sentences=SentenceSettings((pooling,), normalize=normalize),
        overlap=overlap,
    )


def inputs(**changes: object) -> list[EncodeRequest]:
    return [EncodeRequest(f"r{i}", "m", token_source(prompt(length, i)), **changes) for i, length in enumerate(LENGTHS)]  # type: ignore[arg-type]


def encoded(made: EncodeEngine, requests: list[EncodeRequest]) -> list[np.ndarray]:
    for request in requests:
        made.add(request)
    found: dict[str, EncodeOutput] = {}
    while made.has_work:
        outputs, stats = made.step()
        assert stats is not None
        for output in outputs:
            assert output.request_id not in found
            found[output.request_id] = output
    return [np.frombuffer(found[r.request_id].data, "<f4").reshape(found[r.request_id].shape) for r in requests]


def hidden(kind: str, request: EncodeRequest) -> np.ndarray:
    reference = saved(kind).reference
    ids = torch.tensor([request.source.token_ids])
    types = torch.tensor([request.source.token_type_ids or (0,) * ids.shape[1]])
    with torch.inference_mode():
        if kind == "bert":
            return reference(input_ids=ids, token_type_ids=types).last_hidden_state[0].numpy()
        if kind in DECODERS:
            return reference.base_model(input_ids=ids).last_hidden_state[0].numpy()
        return reference.get_encoder()(input_ids=ids).last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    "kind", ["bert", "llama-gqa", "gpt2", "gpt-neox", "gemma", "gemma3", "marian", "t5-relu", "mbart", "umt5"]
)
def test_every_form_gives_transformers_vectors(kind: str) -> None:
    requests = inputs(task=EncodeTask.TOKENS)
    for request, vectors in zip(requests, encoded(engine(kind), requests), strict=True):
        np.testing.assert_allclose(vectors, hidden(kind, request), atol=1e-4)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (Pooling.MEAN, lambda h: h.mean(0)),
        (Pooling.CLS, lambda h: h[0]),
        (Pooling.LAST, lambda h: h[-1]),
        (None, lambda h: h.mean(0)),
    ],
)
def test_pooling(pooling: Pooling | None, expected) -> None:  # type: ignore[no-untyped-def]
    requests = inputs(pooling=pooling)
    for request, vector in zip(requests, encoded(engine(), requests), strict=True):
        np.testing.assert_allclose(vector, expected(hidden("bert", request)), atol=1e-5)


def test_the_pooler() -> None:
    (request, *_) = inputs(pooling=Pooling.POOLER)
    with torch.inference_mode():
        expected = saved("bert").reference(input_ids=torch.tensor([request.source.token_ids])).pooler_output[0]
    np.testing.assert_allclose(encoded(engine(), [request])[0], expected, atol=1e-5)


def test_segments_are_told_apart_and_the_default_is_the_first() -> None:
    plain, *_ = inputs(task=EncodeTask.TOKENS)
    ids = plain.source.token_ids
    first = replace(plain, request_id="first", source=token_source(ids, (0,) * 5))
    mixed = replace(plain, request_id="mixed", source=token_source(ids, (0, 0, 1, 1, 1)))
    vectors = encoded(engine(), [plain, mixed, first])
    np.testing.assert_array_equal(vectors[0], vectors[2])
    np.testing.assert_allclose(vectors[1], hidden("bert", mixed), atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.1


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [None, 8])
def test_normalised_and_cut(normalize: bool, dimensions: int | None) -> None:
    requests = inputs(dimensions=dimensions, normalize=normalize)
    for request, vector in zip(requests, encoded(engine(normalize=not normalize), requests), strict=True):
        expected = hidden("bert", request).mean(0)[:dimensions]
        if normalize:
            expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("modes", "asked"),
    [((mode,), None) for mode in output_heads._TOGETHER]
    + [((Pooling.CLS, Pooling.MEAN), None), ((Pooling.WEIGHTED_MEAN,), Pooling.MAX)],
)
@pytest.mark.parametrize("skipped", [0, 2])
def test_inputs_are_pooled_together_to_the_same_bits(
    modes: tuple[Pooling, ...], asked: Pooling | None, skipped: int
) -> None:
    head = SentenceHead(loaded("bert"), SentenceSettings(modes, normalize=True), CPU)
    lengths = (300, 65, 65, 65, 17, 17, 4, 3, 3)
    requests = [
        EncodeRequest("r", "m", token_source((1,) * size), pooling=asked, prompt_tokens=skipped, dimensions=30)
        for size in lengths
    ]
    hidden = torch.randn(sum(lengths), 40)
    assert head.can_pool_together(requests)
    together = head.pool_together(requests, hidden)
    alone = [head(request, rows) for request, rows in zip(requests, hidden.split(lengths), strict=True)]
    assert together.shape == (len(lengths), 30) and torch.equal(together, torch.stack(alone))


def test_what_differs_or_needs_a_product_is_pooled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, *_ = inputs()
    head = SentenceHead(loaded("bert"), SentenceSettings((Pooling.MEAN,)), CPU)
    assert head.can_pool_together([plain, other])
    for change in (
        {"normalize": True},
        {"dimensions": 8},
        {"pooling": Pooling.CLS},
        {"prompt_tokens": 1},
        {"spans": ((0, 2),)},
        {"task": EncodeTask.TOKENS},
    ):
        assert not head.can_pool_together([plain, replace(other, **change)])
    for pooling in (Pooling.POOLER, Pooling.WEIGHTED_MEAN):
        assert not head.can_pool_together([replace(plain, pooling=pooling)])
    monkeypatch.setattr(SentenceHead, "__call__", None)  # fails if any input is pooled alone
    encoded(engine(), [plain, other])


def test_vectors_depend_on_neither_neighbours_nor_order() -> None:
    requests = inputs()
    together = encoded(engine(), requests)
    alone = [encoded(engine(), [request])[0] for request in requests]
    backwards = encoded(engine(budget=31), requests[::-1])[::-1]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together, backwards, atol=1e-6)


@pytest.mark.parametrize("task", [EncodeTask.FILL_MASK, EncodeTask.SPARSE])
def test_results_over_the_vocabulary_depend_on_neither_neighbours_nor_order(task: EncodeTask) -> None:
    """Check that rows do not depend on the products of 32 rows that inputs share."""
    made = load(ModelSpec("m", str(saved("bert-masked").path), EngineConfig(dtype="float32"))).encode
    requests = inputs(task=task, positions=(0,), top_k=3)
    together = encoded(made, requests)
    alone = [encoded(made, [request])[0] for request in requests]
    backwards = encoded(made, requests[::-1])[::-1]
    for one, two, three in zip(together, alone, backwards, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()


def test_batches_keep_the_order_and_the_budget_and_never_split() -> None:
    made, sizes = engine(budget=20, seqs=2), []
    for request in inputs():
        made.add(request)
    order = []
    while made.has_work:
        outputs, stats = made.step()
        order += [output.request_id for output in outputs]
        assert stats is not None
        sizes.append((stats.num_tokens, stats.num_sequences))
    assert order == [f"r{i}" for i in range(6)]
    assert sizes == [(5, 1), (30, 1), (13, 2), (5, 1), (22, 1)]  # an input beyond the budget runs alone


def test_deadline_and_abort_end_waiting_inputs() -> None:
    made = engine()
    late, gone, kept, *_ = inputs()
    for request in (replace(late, deadline=time.monotonic() - 1), gone, kept):
        made.add(request)
    (aborted,) = made.abort("r1", FinishReason.CANCELLED)
    assert made.abort("r1", FinishReason.CANCELLED) == []
    outputs, _ = made.step()
    ends = {output.request_id: output.finish_reason for output in [aborted, *outputs]}
    assert ends == {"r0": FinishReason.DEADLINE, "r1": FinishReason.CANCELLED, "r2": FinishReason.STOP}
    assert not made.has_work


def test_deadline_ends_an_input_before_the_engines_turn() -> None:
    made = engine(budget=8, seqs=1)
    *ahead, last = inputs()
    for request in (*ahead, replace(last, deadline=time.monotonic() - 1)):
        made.add(request)
    outputs, _ = made.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        (last.request_id, FinishReason.DEADLINE),
        (ahead[0].request_id, FinishReason.STOP),
    ]
    assert made.num_waiting == len(ahead) - 1


def test_packed_input_numbers_each_segment_from_zero() -> None:
    packed = packed_input([(7, 8, 9), (4,), (5, 6)], CPU, causal=False)
    assert packed.input_ids.tolist() == [7, 8, 9, 4, 5, 6]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize(
    "kind", ["bert", "albert", "llama-gqa", "t5-relu", "xlnet", "deberta-v2-convolution", "vit", "bart-nli"]
)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_an_input_beyond_the_budget_pauses_between_layers_and_gets_the_same_bits(kind: str, backend: str) -> None:
    """Check that each step computes one layer and that the result has the bits of an unpaused one."""
    config = EngineConfig(dtype="float32", attention_backend="auto" if backend == "native" else backend)
    made = load(ModelSpec(kind, str(saved(kind).path), config)).encode
    image = made.model.config.image
    source = token_source(prompt(30))
    if image is not None:
        pixels = bytes(i % 251 for i in range(image.pixel_bytes))
        source = image_source(pixels, (image.channels, image.size, image.size), image.num_tokens)
    twice = kind == "bart-nli"  # the classifier also runs the decoder's layers
    request = EncodeRequest("r", kind, source, EncodeTask.LOGITS if twice else EncodeTask.TOKENS)
    (whole,) = encoded(made, [request])
    made.add(request)
    outputs: list[EncodeOutput] = []
    stacks = [stack.num_layers for stack in made.model.config.stacks.values()]
    layers = sum(stacks) if twice else stacks[0]
    assert layers > 1
    for _ in range(layers):
        assert not outputs
        assert made.has_work
        outputs, stats = made.step(StepBudget(whole_tokens=made.demand().whole_tokens))
        assert stats is not None and stats.num_sequences == 1
    assert not made.has_work
    assert outputs[0].data == whole.tobytes()


def short_inputs(count: int) -> list[EncodeRequest]:
    return [EncodeRequest(str(at), "bert", token_source(prompt(4 + at, at))) for at in range(count)]


def test_inputs_beyond_the_budget_are_computed_a_layer_a_step_together() -> None:
    """Check that a budget of 12 of their 22 tokens takes layers of all four, with the bits of whole passes."""
    requests = short_inputs(4)
    expected = encoded(engine(), requests)
    made = engine()
    for request in requests:
        made.add(request)
    layers = made.model.config.stacks["encoder"].num_layers
    found: dict[str, bytes] = {}
    for step in range(layers):
        assert not found and made.demand().whole_tokens == (-(-22 // layers) if step else -(-4 // layers))
        outputs, stats = made.step(StepBudget(whole_tokens=12))
        assert stats is not None and stats.num_sequences == 4
        found |= {output.request_id: output.data for output in outputs}
    assert not made.has_work
    assert [found[request.request_id] for request in requests] == [vector.tobytes() for vector in expected]


def test_one_of_several_paused_inputs_can_be_aborted_or_break(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    requests = short_inputs(4)
    expected = encoded(engine(), requests)
    for request in requests:
        made.add(request)
    made.step(StepBudget(whole_tokens=12))
    assert [output.request_id for output in made.abort("2", FinishReason.CANCELLED)] == ["2"]
    assert made.abort("2", FinishReason.CANCELLED) == []
    real = StackPass.advance

    def advance(self: StackPass, layers: int) -> None:
        if self._residual.whole.shape[0] in (22, 5):  # all of them, and the second alone
            raise RuntimeError("broken")
        real(self, layers)

    monkeypatch.setattr(StackPass, "advance", advance)
    outputs, _ = made.step(StepBudget(whole_tokens=12))
    ended = {output.request_id: output for output in outputs}
    assert {name: output.finish_reason for name, output in ended.items()} == {
        "0": FinishReason.STOP,
        "1": FinishReason.ERROR,
        "3": FinishReason.STOP,
    }
    assert all(ended[name].data == expected[int(name)].tobytes() for name in ("0", "3"))
    assert not made.has_work


def test_paused_input_can_be_aborted_and_expire() -> None:
    made = engine()
    for late in (False, True):
        request = EncodeRequest(
            "r", "bert", token_source(prompt(30)), deadline=time.monotonic() + 0.05 if late else None
        )
        made.add(request)
        made.step(StepBudget(whole_tokens=1))
        if late:
            time.sleep(0.06)
        outputs = made.check_deadlines() if late else made.abort("r", FinishReason.CANCELLED)
        assert [output.finish_reason for output in outputs] == [
            FinishReason.DEADLINE if late else FinishReason.CANCELLED
        ]
        assert not made.has_work


def test_an_input_that_breaks_while_paused_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    made.add(EncodeRequest("broken", "bert", token_source(prompt(30))))
    made.add(EncodeRequest("next", "bert", token_source(prompt(5))))
    made.step(StepBudget(whole_tokens=1))
    monkeypatch.setattr(StackPass, "advance", lambda self, layers: 1 / 0)
    monkeypatch.setattr(made, "probe", lambda: None)
    outputs, _ = made.step(StepBudget(whole_tokens=1))
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("broken", FinishReason.ERROR)]
    monkeypatch.undo()
    outputs, _ = made.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("next", FinishReason.STOP)]


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on another device."""

    device = SimpleNamespace(type="cuda")  # type: ignore[assignment]


def test_a_batch_comes_from_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that several vectors are copied as one."""
    copies: list[int] = []

    class HostCopy:
        def __init__(self, tensor: torch.Tensor) -> None:
            copies.append(tensor.numel())
            self.tensor = tensor.as_subclass(torch.Tensor)

        def get(self) -> torch.Tensor:
            return self.tensor

    monkeypatch.setattr(devices, "HostCopy", HostCopy)
    vectors = [torch.randn(4), torch.randn(3, 2).t(), torch.randn(1)]
    found = devices.HostCopies([one.as_subclass(Elsewhere) for one in vectors]).get()
    assert copies == [11]
    assert all(torch.equal(one, expected) and one.is_contiguous() for one, expected in zip(found, vectors, strict=True))
    assert devices.HostCopies([]).get() == []


def test_a_step_brings_all_its_vectors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = devices.HostCopies
    monkeypatch.setattr(encode_results, "HostCopies", lambda tensors: sizes.append(len(tensors)) or real(tensors))
    one = engine("bert")
    for number in range(5):
        one.add(EncodeRequest(str(number), "bert", token_source(prompt(3 + number)), EncodeTask.EMBEDDING))
    outputs, _ = one.step()
    assert (sizes, len(outputs)) == ([5], 5)


def test_an_input_that_breaks_before_its_first_layer_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    made.add(EncodeRequest("broken", "bert", token_source(prompt(30))))
    made.add(EncodeRequest("next", "bert", token_source(prompt(5))))
    monkeypatch.setattr(type(made.model), "begin", lambda self, inputs: 1 / 0)
    outputs, _ = made.step(StepBudget(whole_tokens=1))
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("broken", FinishReason.ERROR)]
    outputs, _ = made.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("next", FinishReason.STOP)]


class Device:
    """A device that computes batches in their order; the host waits for a batch when it reads the results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.broken: int | None = None  # the batch whose results cannot be read
        real, device = devices.HostCopies, self

        class Copies(real):  # type: ignore[misc, valid-type]
            def __init__(self, tensors: list[torch.Tensor]) -> None:
                super().__init__([tensor.clone() for tensor in tensors])  # which a later batch may overwrite
                self.number = sum(line.startswith("launch") for line in device.log)
                device.log.append(f"launch {self.number}")

            def get(self) -> list[torch.Tensor]:
                device.log.append(f"wait {self.number}")
                if self.number == device.broken:
                    raise RuntimeError("an illegal memory access was encountered")
                return super().get()

        monkeypatch.setattr(encode_results, "HostCopies", Copies)


def test_a_batch_is_launched_before_the_last_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [EncodeRequest(str(number), "m", token_source(prompt(30, number))) for number in range(7)]
    expected = encoded(engine(), requests)
    device, made = Device(monkeypatch), engine(overlap=True)
    for one in requests:
        made.add(one)
    found: dict[str, np.ndarray] = {}
    counts = []
    while made.has_work:
        outputs, stats = made.step()
        counts.append((len(outputs), stats.num_sequences if stats is not None else None))
        found |= {output.request_id: np.frombuffer(output.data, "<f4") for output in outputs}
    assert counts == [(0, None), (2, 2), (2, 2), (2, 2), (1, 1)]
    assert device.log == [
        *("launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"),
    ]
    for request, vector in zip(requests, expected, strict=True):
        np.testing.assert_array_equal(found[request.request_id], vector)


def test_a_pending_batch_is_collected_when_there_is_nothing_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    made = engine(overlap=True)
    made.add(EncodeRequest("r", "m", token_source(prompt(5))))
    assert made.step() == ([], None)
    assert made.has_work and made.demand() == StepDemand()
    assert made.abort("r", FinishReason.CANCELLED) == []  # it ends with its results
    (output,), stats = made.finish_pending()
    assert (output.request_id, output.finish_reason, stats and stats.num_tokens) == ("r", FinishReason.STOP, 5)
    assert not made.has_work and made.finish_pending() == ([], None)


def test_a_pending_batch_is_collected_before_an_input_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    made = engine(overlap=True)
    for name, length in (("short", 5), ("long", 60)):
        made.add(EncodeRequest(name, "m", token_source(prompt(length))))
    assert made.step(StepBudget(whole_tokens=20)) == ([], None)
    (output,), _ = made.step(StepBudget(whole_tokens=20))
    assert output.request_id == "short"
    ended = [output.request_id for _ in range(9) for output in made.step(StepBudget(whole_tokens=20))[0]]
    assert ended == ["long"] and not made.has_work


def test_inputs_of_two_batches_end_once_if_the_device_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that results which cannot be read end their inputs, the batch launched after them, and what waits."""
    device, made = Device(monkeypatch), engine(overlap=True)
    for number in range(5):
        made.add(EncodeRequest(str(number), "m", token_source(prompt(30, number))))
    device.broken = 0
    assert made.step() == ([], None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.step()
    ended = made.recover()
    assert sorted(output.request_id for output in ended) == list("01234")
    assert {output.finish_reason for output in ended} == {FinishReason.ERROR}
    assert not made.has_work


def test_an_input_that_breaks_fails_alone_when_batches_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    made = engine(overlap=True, budget=12)
    for number, ids in enumerate(((5, 6), (5, 10_000), (7,) * 11, (8,))):  # a token id beyond the vocabulary
        made.add(EncodeRequest(str(number), "m", token_source(ids)))
    found: dict[str, FinishReason | None] = {}
    while made.has_work:
        found |= {output.request_id: output.finish_reason for output in made.step()[0]}
    assert found == {"0": FinishReason.STOP, "1": FinishReason.ERROR, "2": FinishReason.STOP, "3": FinishReason.STOP}


POOLED = (
    {},
    {"pooling": Pooling.CLS},
    {"pooling": Pooling.LAST},
    {"pooling": Pooling.MAX},
    {"pooling": Pooling.MEAN_SQRT_LEN, "normalize": False},
    {"dimensions": 8, "normalize": True},
)


@pytest.mark.parametrize("prompt_tokens", [0, 2])
@pytest.mark.parametrize("settings", POOLED, ids=str)
def test_a_gpu_pools_all_inputs_by_few_operations(settings: dict[str, Any], prompt_tokens: int) -> None:
    lengths = (5, 30, 3, 12, 5, 22)
    texts = [token_source(prompt(length, number)) for number, length in enumerate(lengths)]
    requests = [
        EncodeRequest(str(i), "m", text, prompt_tokens=prompt_tokens, **settings) for i, text in enumerate(texts)
    ]
    made = engine(budget=200)
    alone = encoded(made, requests)
    made._head.together = True
    for vector, expected in zip(encoded(made, requests), alone, strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-6, rtol=1e-5)


class Operations(TorchDispatchMode):
    """Notes torch's operations while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_a_gpu_launches_for_a_batch_does_not_depend_on_its_lengths() -> None:
    head, counts = engine()._head, []
    head.together = True
    for lengths in ((9,), (7, 9), tuple(range(1, 30))):
        requests = [EncodeRequest("r", "m", token_source(prompt(length))) for length in lengths]
        with Operations() as seen:
            head.pool_together(requests, torch.ones(sum(lengths), 32))
        counts.append(len(seen.names))
    assert max(counts) <= 12 and counts[1] == counts[2], counts


@pytest.mark.parametrize(
    "kind",
    ["bert-sequence", "roberta-sequence", "modernbert-sequence-mean", "llama-sequence", "bart-nli", "bert-token"],
)
def test_a_gpu_classifies_all_inputs_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = (EncodeTask.LOGITS, EncodeTask.SCORES, EncodeTask.SCORES, EncodeTask.EMBEDDING, EncodeTask.LOGITS)
    requests = [
        EncodeRequest(str(number), "m", token_source(prompt(4 + 3 * number, number)), task)
        for number, task in enumerate(tasks)
    ]
    made = engine(kind, budget=200)
    alone = encoded(made, requests)
    made._labels.together, calls = True, []
    real = type(made.model).classify_rows
    monkeypatch.setattr(
        type(made.model), "classify_rows", lambda model, rows: calls.append(len(rows)) or real(model, rows)
    )
    for found, expected in zip(encoded(made, requests), alone, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-4)
    assert calls == ([] if kind in ("modernbert-sequence-mean", "bert-token") else [4])
