"""Pictures in prompts: logits equal those of `transformers`, however a prompt is cut, shared or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.support import Running, running
from tests.model.checkpoints import copied, native_backends, prompt, saved
from tests.model.lora import matrices, merged, write_adapter
from tests.model.picture_models import IMAGE, PICTURE_MODELS, SQUARES, picture, with_pictures, write_processor
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import FinishReason, Request, Source, sent_once
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.scheduling.scheduled_step import StepBudget
from triptych.model.engine.scheduling.source_blocks import SourcePasses
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM

KIND, BOTH_WAYS = "qwen3-5-pictures", "gemma3-pictures"
# Whose positions have three coordinates; whose tokens have vectors for every layer, and a picture's none of their own.
ANY_SIZE = pytest.mark.parametrize("kind", [KIND, "gemma4-pictures"])
SEEING_THEMSELVES = pytest.mark.parametrize("kind", [BOTH_WAYS, "gemma4-dense-pictures", "gemma4-experts-pictures"])
FIRST, SECOND, THIRD = picture(16, 40, 1), picture(8, 8, 2), picture(40, 24, 3)
SECOND_LARGE = picture(24, 24, 4)  # within the bounds of the processor


def asking(name: str, parts: Sequence[Sequence[int] | Source], kind: str = KIND, **params: Any) -> Request:
    """Return a request about texts and pictures."""
    ids, images = with_pictures(parts)
    return Request(
        name,
        kind,
        ids,
        SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "suppress_tokens": (IMAGE,), **params}),
        images=images,
    )


def questions(kind: str = KIND) -> list[Request]:
    return [
        asking("one", [prompt(5), FIRST, prompt(7)], kind),
        asking("first", [THIRD, prompt(3)], kind),
        asking("several", [prompt(3), FIRST, prompt(1), SECOND, prompt(4), THIRD, prompt(2)], kind),
        asking("text", [prompt(21)], kind),
        asking("equal", [prompt(2), FIRST, prompt(9)], kind),
    ]


def worst(run: Running, requests: Sequence[Request]) -> float:
    return max(run.runner.worst(one.model, one, run.ids(one.request_id)) for one in requests)


@ANY_SIZE
@pytest.mark.parametrize("budget", [256, 7, 1])
def test_logits_equal_transformers_wherever_prompts_are_cut(kind: str, budget: int) -> None:
    run = running(kind, budget=budget)
    for one in questions(kind):
        run.engine.add(one)
    assert worst(run.run(), questions(kind)) < 1e-4


def test_logits_of_c_equal_transformers() -> None:
    for backend in native_backends():
        run = running(KIND, backend=backend, budget=11)
        for one in questions():
            run.engine.add(one)
        assert worst(run.run(), questions()) < 1e-4


@pytest.mark.parametrize("kind", [kind for kind in PICTURE_MODELS if kind != KIND])
def test_logits_of_other_towers_equal_transformers(kind: str) -> None:
    side, row_end = SQUARES.get(kind), 7 if kind in ("mistral3", "llava-pixtral") else None
    first, second = (picture(side, side, seed) for seed in (1, 2)) if side else (FIRST, THIRD)
    prompts = [[prompt(5), first, prompt(7)], [second, prompt(3), first, [5], second, prompt(9)], [prompt(11)]]
    short = 17 if kind.startswith("gemma") else 7  # at least a picture that is not cut
    for backend, budget in [(None, 256), *((one, short) for one in native_backends())]:
        run = running(kind, **({} if backend is None else {"backend": backend}), budget=budget)
        requests = []
        for number, parts in enumerate(prompts):
            ids, images = with_pictures(parts, row_end)
            params = SamplingParams(max_tokens=5, ignore_eos=True, suppress_tokens=(IMAGE,))
            requests.append(Request(str(number), kind, ids, params, images=images))
            run.engine.add(requests[-1])
        run.run()
        assert max(run.runner.worst(kind, one, run.ids(one.request_id)) for one in requests) < 1e-4


def encoded(run: Running) -> int:
    return run.engine.scheduler.pictures.num_encoded


@ANY_SIZE
def test_a_preempted_prompt_is_computed_again(kind: str) -> None:
    run = running(kind, num_blocks=24 if kind == KIND else 40, max_num_seqs=4, budget=16)
    requests = [asking(str(number), [prompt(3 + number), FIRST, prompt(9)], kind, max_tokens=20) for number in range(4)]
    for one in requests:
        run.engine.add(one)
    assert worst(run.run(), requests) < 1e-4
    assert run.engine.scheduler.num_preemptions > 0


@ANY_SIZE
def test_a_prefix_that_is_cached_needs_no_picture(kind: str) -> None:
    run = running(kind, picture_rows=16)
    first, again = (asking(name, [prompt(6), THIRD, prompt(11)], kind) for name in ("first", "again"))
    longer = asking("longer", [prompt(6), THIRD, prompt(11), [*run_ids(first)], SECOND, prompt(5)], kind)
    for one, count in ((first, 1), (again, 1), (longer, 2)):
        run.engine.add(one)
        run.run()
        assert encoded(run) == count
    assert max(output.cached_tokens for output in run.outputs if output.request_id == "again") >= 24
    assert worst(run, [first, again, longer]) < 1e-4


def run_ids(one: Request) -> list[int]:
    run = running(one.model)
    run.engine.add(one)
    return run.run().ids(one.request_id)


def test_a_hit_may_end_within_a_picture() -> None:
    """Check that a prompt goes on within a picture that is kept no longer."""
    run = running(KIND, budget=8)
    whole = asking("whole", [prompt(2), THIRD, prompt(11)])
    run.engine.add(whole)
    run.step(2)  # two chunks: the second ends within the picture
    run.engine.scheduler.preempt(run.engine.scheduler.running[0])
    run.engine.scheduler.pictures.reset()
    run.run()
    assert worst(run, [whole]) < 1e-4


def test_pictures_of_equal_places_share_no_blocks() -> None:
    other = picture(16, 40, seed=9)
    run = running(KIND)
    requests = [asking(str(number), [prompt(6), shown, prompt(11)]) for number, shown in enumerate((FIRST, other))]
    assert requests[0].prompt_token_ids == requests[1].prompt_token_ids
    for one in requests:
        run.engine.add(one)
        run.run()
    assert worst(run, requests) < 1e-4
    assert run.ids("0") != run.ids("1")
    assert max(output.cached_tokens for output in run.outputs) <= 4  # the block before both


@pytest.mark.parametrize("params", [{"n": 3, "temperature": 1.0}, {"num_beams": 3}], ids=str)
def test_outputs_of_one_request_share_its_picture(params: dict[str, Any]) -> None:
    run = running(KIND, budget=16)
    run.engine.add(asking("r", [prompt(6), FIRST, prompt(3)], **params))
    run.run()
    assert encoded(run) == 1


def test_equal_pictures_are_encoded_once_but_not_for_another_salt() -> None:
    run = running(KIND)
    requests = [asking(str(number), [prompt(4 + number), FIRST, prompt(3)]) for number in range(3)]
    for one in [*requests, replace(requests[0], request_id="salt", cache_salt="other")]:
        run.engine.add(one)
    run.run()
    assert encoded(run) == 2


def test_a_picture_that_is_repeated_may_have_its_pixels_once() -> None:
    run, whole = running(KIND), asking("r", [FIRST, prompt(3), SECOND, prompt(1), FIRST, prompt(2)])
    sent = replace(whole, images=sent_once(whole.images))
    assert [bool(one.source.features) for one in sent.images] == [True, True, False]
    run.engine.add(sent)
    assert worst(run.run(), [whole]) < 1e-4


def test_pictures_are_kept_within_bounds() -> None:
    """Check that prompts whose pictures do not fit together take turns."""
    run = running(KIND, picture_rows=15, budget=12)
    requests = [asking(str(seed), [picture(40, 24, seed), prompt(5)]) for seed in range(4)]
    store = run.runner._pictures
    assert store is not None
    for one in requests:
        run.engine.add(one)
    while run.engine.has_work:
        run.step()
        assert sum(map(len, store._known.values())) <= 15
        assert list(store._known) == list(run.engine.scheduler.pictures.kept)
    assert worst(run, requests) < 1e-4


def test_a_request_has_the_same_bits_alone_and_with_others() -> None:
    for backend in native_backends():
        together = running(KIND, backend=backend, budget=11)
        for one in questions():
            together.engine.add(one)
        together.run()
        for one in questions():
            alone = running(KIND, backend=backend)
            alone.engine.add(one)
            alone.run()
            ours, theirs = (dict(run.runner.rows[one.request_id]) for run in (alone, together))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[place], theirs[place]) for place in ours)


def test_a_picture_is_encoded_in_parts_beside_a_stream() -> None:
    rows = []
    for limit, backend in product((None, 5), native_backends()):
        run = running(KIND, backend=backend)
        run.engine.scheduler.source_passes = passes = SourcePasses(3)
        run.engine.scheduler.pictures._passes = passes
        stream, asked = asking("stream", [prompt(4)], max_tokens=12), asking("r", [prompt(3), THIRD, prompt(2)])
        run.engine.add(stream)
        run.step()
        run.engine.add(asked)
        whole = []
        for _ in range(5):
            demand = run.engine.demand()
            outputs, stats = run.engine.step(StepBudget(whole_tokens=limit))
            run.outputs += outputs
            assert stats is not None
            whole.append((demand.whole_tokens, stats.num_whole_tokens))
        run.run()
        assert len(run.ids("stream")) == 12
        assert whole[:3] == ([(5, 5), (5, 5), (5, 5)] if limit else [(5, 15), (0, 0), (0, 0)])
        rows.append([row for _, row in run.runner.rows["r"]])
    assert all(map(torch.equal, *rows)) if rows else native_backends() == ()


def test_drafts_after_a_picture_change_nothing() -> None:
    text = [15, 6, 37, 15, 6, 37, 15, 6]
    plain, drafted = (asking("r", [text, FIRST, text], max_tokens=20, num_speculative_tokens=n) for n in (0, 4))
    found = []
    for one in (plain, drafted):
        run = running(KIND)
        run.engine.add(one)
        found.append(run.run().ids("r"))
    assert found[0] == found[1]
    assert sum(output.drafted_tokens for output in run.outputs) > 0


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(saved(KIND).path, EngineConfig(dtype="float32", max_num_seqs=4, block_size=4, kv_cache_memory=1 << 22))


def png(source: Source) -> bytes:
    """Return a file of a picture."""
    pixels = np.frombuffer(source.features, np.uint8).reshape(source.shape).transpose(1, 2, 0)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_offline_prompts_take_files(llm: LLM, tmp_path: Path) -> None:
    """Check that a file whose sides fit is read as its pixels, by bytes and by path."""
    (tmp_path / "third.png").write_bytes(png(THIRD))
    one = asking("r", [prompt(3), SECOND_LARGE, prompt(4), THIRD, prompt(2)])
    run = running(KIND)
    run.engine.add(one)
    run.run()
    ids = [*prompt(3), IMAGE, *prompt(4), IMAGE, *prompt(2)]
    found = llm.stream([ids], one.params, images=[[png(SECOND_LARGE), tmp_path / "third.png"]])
    assert [token for _, output in found for token in output.token_ids] == run.ids("r")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([["none.png"]], "images: prompt 0: none.png: No such file or directory"),
        ([[b"GIF89a"]], "images: prompt 0: "),
        ([[]], r"images: prompt 0 has 0 files and 1 places for them \(token 0\)"),
        ([[], []], "expected a list of files for each prompt, found 2 lists for 1 prompts"),
        (["a.png"], "images: expected a list of files for each prompt"),
    ],
)
def test_what_is_no_picture_of_a_prompt_is_named(llm: LLM, images: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(llm.stream([[5, IMAGE, 6]], images=images))


def test_a_model_of_texts_refuses_pictures() -> None:
    llm = LLM(saved("llama-gqa").path, EngineConfig(dtype="float32", kv_cache_memory=1 << 20))
    with llm, pytest.raises(ConfigError, match="llama-gqa does not read pictures in prompts"):
        list(llm.stream([[5, 6]], images=[[b""]]))


# -- Pictures whose tokens see each other both ways (Gemma 3): a chunk does not cut them.

SQUARE, OTHER = picture(32, 32, 5), picture(32, 32, 6)  # 16 tokens, more than a window


def squares(kind: str, **params: Any) -> list[Request]:
    parts: list[list[Sequence[int] | Source]] = [
        [prompt(6), SQUARE, prompt(11)],
        [SQUARE, prompt(2), OTHER, prompt(5), SQUARE, prompt(3)],
        [prompt(30)],
        [prompt(21), OTHER, prompt(1)],
    ]
    return [asking(str(number), one, kind, **params) for number, one in enumerate(parts)]


@SEEING_THEMSELVES
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_picture_that_sees_itself_is_computed_in_one_step(kind: str, tokens: int) -> None:
    """Check prompts that are paced while a stream decodes, in chunks shorter than a picture."""
    run = running(kind, budget=24)
    run.engine.add(asking("stream", [prompt(3)], kind, max_tokens=60))
    run.step()
    for one in squares(kind):
        run.engine.add(one)
    while run.engine.has_work:
        streamed = len(run.ids("stream"))
        run.outputs += run.engine.step(StepBudget(prompt_tokens=tokens, whole_tokens=16))[0]
        run.engine.check_invariants()
        assert len(run.ids("stream")) == min(60, streamed + 1)
    assert worst(run, squares(kind)) < 1e-4


@SEEING_THEMSELVES
def test_without_both_ways_logits_differ(kind: str) -> None:
    run = running(kind)
    run.runner._both_ways = False
    run.engine.add(squares(kind)[0])
    assert worst(run.run(), squares(kind)[:1]) > 1e-2


def test_layers_without_a_window_see_no_later_tokens_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that Gemma 4's logits differ where all layers see pictures both ways, as Gemma 3's do."""
    kind = "gemma4-dense-pictures"
    run = running(kind)
    config = run.runner.model.config
    assert config.pictures is not None
    everywhere = replace(config, pictures=replace(config.pictures, in_windows=False))
    monkeypatch.setattr(run.runner.model, "config", everywhere)
    run.engine.add(squares(kind)[0])
    assert worst(run.run(), squares(kind)[:1]) > 1e-3


@SEEING_THEMSELVES
def test_pictures_that_see_themselves_are_preempted(kind: str) -> None:
    run = running(kind, num_blocks=26, max_num_seqs=4, budget=24)
    for one in squares(kind, max_tokens=30):
        run.engine.add(one)
    assert worst(run.run(), squares(kind, max_tokens=30)) < 1e-4
    assert run.engine.scheduler.num_preemptions > 0


@SEEING_THEMSELVES
def test_pictures_that_see_themselves_are_found_again(kind: str) -> None:
    """Check hits that end before, within and after a picture."""
    run = running(kind)
    first = asking("0", [prompt(6), SQUARE, prompt(11)], kind)
    others = [
        asking("1", [prompt(6), SQUARE, prompt(1), prompt(11)], kind),
        asking("2", [prompt(6), OTHER, prompt(11)], kind),
        replace(first, request_id="3"),
    ]
    for one in [first, *others]:
        run.engine.add(one)
        run.run()
    found = [max(output.cached_tokens for output in run.outputs if output.request_id == str(n)) for n in range(4)]
    assert found == [0, 20, 4, 32]
    assert worst(run, [first, *others]) < 1e-4


def test_a_model_whose_pictures_fit_no_step_reads_none(caplog: pytest.LogCaptureFixture) -> None:
    settings = dict(dtype="float32", kv_cache_memory=1 << 22, max_num_seqs=4)
    with LLM(saved(BOTH_WAYS).path, EngineConfig(**settings, max_num_batched_tokens=12)) as llm:
        assert not llm.info.reads_pictures
        with pytest.raises(ConfigError, match="does not read pictures"):
            list(llm.stream([[5, IMAGE]], images=[[png(SQUARE)]]))
    assert "pictures are not read: max_num_batched_tokens is 12, and one takes 16 tokens of a step" in caplog.text
    with LLM(saved(BOTH_WAYS).path, EngineConfig(**settings, max_num_batched_tokens=16)) as llm:
        assert llm.info.reads_pictures


def test_adapters_change_towers_too(tmp_path: Path) -> None:
    """Check tokens against the merged model, together with requests that have no adapter."""
    reference = saved(KIND).reference
    pairs = matrices(reference, r"visual\.blocks\.\d+\.(attn|mlp)|self_attn\.|layers\.\d+\.mlp", 4, seed=4)
    adapter = write_adapter(tmp_path / "sql", pairs)
    merged(reference, pairs).save_pretrained(tmp_path / "merged")
    write_processor(KIND, tmp_path / "merged")
    settings = EngineConfig(dtype="float32", max_num_seqs=4, block_size=4, kv_cache_memory=1 << 22)
    prompts = [[*prompt(4), IMAGE, *prompt(3)], [IMAGE, *prompt(6)]]
    given = dict(params=dict(max_tokens=8, suppress_tokens=[IMAGE], temperature=0.0), images=[[png(THIRD)]] * 2)

    def generated(llm: LLM, **which: Any) -> list[list[int]]:
        found: list[list[int]] = [[], []]
        for place, output in llm.stream(prompts, **given, **which):
            found[place] += output.token_ids
        return found

    with LLM(tmp_path / "merged", settings) as other, LLM(saved(KIND).path, settings, lora={"sql": adapter}) as llm:
        plain = generated(llm)
        assert generated(llm, lora="sql") == generated(other)
        assert generated(llm) == plain != generated(other)


def test_adapters_may_change_what_is_not_read(tmp_path: Path) -> None:
    """Check an adapter of all layers of a tower: the last one is not read, or none is."""
    pairs = matrices(saved("llava").reference, r"q_proj", 4, seed=4)
    assert any("vision_tower.encoder.layers.2." in name for name in pairs)
    texts = {name: pair for name, pair in pairs.items() if "vision" not in name}
    towers = {name: pair for name, pair in pairs.items() if "vision" in name}
    adapters = {"whole": write_adapter(tmp_path / "whole", pairs), "texts": write_adapter(tmp_path / "texts", texts)}
    settings = EngineConfig(dtype="float32", kv_cache_memory=1 << 22, pictures=False)
    with LLM(saved("llava").path, settings, lora=adapters) as llm:
        asked = [
            [token for _, one in llm.stream([prompt(5)], lora=name) for token in one.token_ids] for name in adapters
        ]
        assert asked[0] == asked[1]
    with pytest.raises(ConfigError, match="the adapter changes only what reads pictures"):
        LLM(saved("llava").path, settings, lora={"tower": write_adapter(tmp_path / "tower", towers)})
    LLM(saved("llava").path, replace(settings, pictures=True), lora={"whole": adapters["whole"]}).close()
    strange = {name.replace("q_proj", "query"): pair for name, pair in towers.items()}
    with pytest.raises(ConfigError, match="has no projection"):
        LLM(
            *(saved("llava").path, replace(settings, pictures=True)),
            lora={"strange": write_adapter(tmp_path / "s", strange)},
        )


def test_a_picture_that_cannot_be_encoded_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = running(KIND, budget=16)
    store = run.runner._pictures
    assert store is not None
    begin = store._begin

    def broken(source: Source, adapter: Any) -> Any:
        if source.digest == SECOND.digest:
            raise RuntimeError("broken")
        return begin(source, adapter)

    monkeypatch.setattr(store, "_begin", broken)
    good, bad = asking("good", [prompt(3), FIRST, prompt(4)]), asking("bad", [prompt(2), SECOND, prompt(4)])
    for one in (good, bad):
        run.engine.add(one)
    run.run()
    assert [output.finish_reason for output in run.outputs if output.request_id == "bad"] == [FinishReason.ERROR]
    assert worst(run, [good]) < 1e-4


def test_a_request_that_is_cancelled_leaves_no_picture_begun() -> None:
    run = running(KIND)
    run.engine.scheduler.source_passes = run.engine.scheduler.pictures._passes = passes = SourcePasses(3)
    run.engine.add(asking("r", [prompt(3), THIRD, prompt(2)]))
    run.outputs += run.engine.step(StepBudget(whole_tokens=5))[0]
    store = run.runner._pictures
    assert store is not None
    assert store._ahead is not None
    run.engine.abort("r", None, FinishReason.CANCELLED)
    assert (passes.current, store._ahead) == (None, None)
    run.run()


def test_texts_have_the_same_bits_as_without_a_tower(tmp_path: Path) -> None:
    """Check a folder that says nothing of pictures, and the setting; a tower that is not read takes no memory."""
    folder, whole = copied(KIND, tmp_path), saved(KIND).path
    (folder / "preprocessor_config.json").unlink()
    settings = EngineConfig(dtype="float32", max_num_seqs=4, block_size=4, kv_cache_memory=1 << 22)
    found, bytes_taken = [], []
    for path, given in ((whole, settings), (whole, replace(settings, pictures=False)), (folder, settings)):
        with LLM(path, given) as llm:
            assert llm.info.reads_pictures == (given.pictures and path == whole)
            outputs = [output for _, output in llm.stream([prompt(23)], dict(max_tokens=8, logprobs=5))]
            found.append([(output.token_ids, output.logprobs) for output in outputs])
            bytes_taken.append(llm.info.memory_bytes)
    assert found[0] == found[1] == found[2]
    assert bytes_taken[1] == bytes_taken[2] < bytes_taken[0] - 100_000  # the weights alone have 200 kB


def test_engines_refuse_pictures_that_their_model_does_not_read() -> None:
    run = running("llama-gqa")
    with pytest.raises(ConfigError, match="images: llama-gqa does not read pictures in prompts"):
        run.engine.add(asking("r", [prompt(3), FIRST], "llama-gqa"))
    assert not run.engine.has_work


def test_a_draft_model_has_no_tower() -> None:
    """Check that the pictures of a prompt are tokens to it, and change no output."""
    found, kind = [], "qwen3-vl-pictures"
    settings = EngineConfig(dtype="float32", block_size=4, kv_cache_memory=1 << 22, num_speculative_tokens=3)
    for given in (replace(settings, num_speculative_tokens=0), replace(settings, draft_model=str(saved(kind).path))):
        with LLM(saved(kind).path, given) as llm:
            asked = llm.stream([[*prompt(5), IMAGE, *prompt(4)]], dict(max_tokens=30), images=[[png(THIRD)]])
            outputs = [output for _, output in asked]
            found.append([token for output in outputs for token in output.token_ids])
            runner = llm._generate.runner if llm._generate is not None else None
    assert found[0] == found[1]
    assert sum(output.drafted_tokens for output in outputs) > 0
    assert isinstance(runner, ModelRunner) and runner.draft_model is not None
    assert runner.draft_model.model.pictures is None
