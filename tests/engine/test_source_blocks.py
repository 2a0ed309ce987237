"""Sources of encoder-decoders are encoded once for all readers, freed with the last, encoded again if evicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.scripted import Harness, breaks_on, expected_tokens, request
from tests.engine.support import running
from tests.model.checkpoints import START, prompt
from triptych.model.api.request import Request, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.scheduling.source_blocks import SourceBlocks
from triptych.model.network.inputs import StackInput
from triptych.model.network.transformer import Transformer


def encoded(harness: Harness) -> list[str]:
    """Return the requests whose source was encoded, in order."""
    steps = (s for step in harness.runner.steps for s in step.scheduled)
    return [s.sequence.request.request_id for s in steps if s.encode_source]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_source_is_encoded_once_for_all_sequences_of_its_request(prefix_caching: bool) -> None:
    harness = Harness(num_blocks=20, prefix_caching=prefix_caching)
    made = harness.add("r", 1, source=24, n=8, max_tokens=4)  # alone each would need seven blocks
    harness.step()
    manager = harness.engine.block_manager
    assert manager.num_blocks - manager.num_free == 6 + 8
    harness.run()
    assert encoded(harness) == ["r"]
    assert all(harness.tokens("r", index) == expected_tokens(made) for index in range(8))


def test_equal_sources_are_shared_while_one_of_them_is_there_and_within_a_salt() -> None:
    harness = Harness()
    source = list(range(500, 515))
    made = [harness.add("a", 1, source=source, max_tokens=3), harness.add("b", [1], source=source, max_tokens=9)]
    harness.step()
    harness.step()
    made.append(harness.add("c", [2], source=source, max_tokens=2))
    made.append(harness.add("salted", [2], source=source, max_tokens=2, cache_salt="x"))
    made.append(harness.add("other", [2], source=[1, *source[1:]], max_tokens=2))
    harness.run()
    assert encoded(harness) == ["a", "salted", "other"]
    made.append(harness.add("later", [3], source=source, max_tokens=2))
    harness.run()
    assert encoded(harness) == ["a", "salted", "other", "later"]
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)


def test_a_source_that_others_will_follow_for_stays_until_something_needs_its_room() -> None:
    harness = Harness(num_blocks=16)
    source = list(range(500, 524))

    def ask(name: str, salt: str = "", keeps: bool = True) -> Request:
        made = request(name, [ord(name[0])], source=source, max_tokens=3, cache_salt=salt)
        harness.engine.add(replace(made, keeps_source=keeps))
        harness.run()
        return made

    made = [ask("a"), ask("b"), ask("c", salt="x"), ask("d")]
    assert encoded(harness) == ["a", "c"]
    made.append(harness.add("long", 50, max_tokens=9))
    harness.run()
    made += [ask("e"), ask("f", keeps=False)]
    assert encoded(harness) == ["a", "c", "e"]
    made += [ask("g")]
    assert encoded(harness) == ["a", "c", "e", "g"]
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)


def test_failed_source_does_not_affect_other_sources() -> None:
    harness = Harness()
    source = list(range(500, 515))
    harness.add("failing", [9], source=source, max_tokens=3)
    made = [harness.add(f"r{i}", [i], source=source, max_tokens=4) for i in range(3)]
    breaks_on(harness, "failing")
    harness.run()
    assert harness.ends()["failing", 0] == "error"
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)


def test_a_preempted_sequence_finds_its_source_encoded() -> None:
    harness = Harness(prefix_caching=False)
    made = harness.add("r", 1, source=24, max_tokens=6)
    harness.step()
    harness.engine.scheduler.preempt(harness.engine.scheduler.running[0])
    harness.engine.check_invariants()
    assert harness.engine.block_manager.num_cached == 6
    harness.run()
    assert encoded(harness) == ["r"]
    assert harness.tokens("r") == expected_tokens(made)
    assert harness.engine.block_manager.num_cached == 0


def test_evicted_source_of_a_preempted_sequence_is_encoded_again() -> None:
    harness = Harness(num_blocks=10)
    made = [harness.add("first", 1, source=24, max_tokens=9)]
    harness.step()
    made.append(harness.add("urgent", [8], source=20, max_tokens=9, priority=-1))
    harness.engine.scheduler.preempt(harness.engine.scheduler.running[0])
    harness.run()
    assert encoded(harness) == ["first", "urgent", "first"]
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)


@pytest.mark.parametrize("ends", ["aborted", "finished"])
def test_a_source_is_free_when_its_last_user_ends_though_that_waits(ends: str) -> None:
    harness = Harness(prefix_caching=False)
    source = list(range(500, 524))
    harness.add("a", 1, source=source, max_tokens=20)
    harness.step()
    manager = harness.engine.block_manager
    harness.engine.scheduler.preempt(harness.engine.scheduler.running[0])
    assert manager.num_cached == 6
    if ends == "aborted":
        harness.abort("a")
    else:
        harness.run()
    assert (manager.num_cached, manager.num_free) == (0, manager.num_blocks)


@pytest.mark.parametrize("kind", ["marian", "t5-relu"])
@pytest.mark.parametrize(
    ("salts", "settings", "calls"),
    [(("",), {"n": 4}, 1), (("",), {"num_beams": 3, "n": 3}, 1), (("", ""), {}, 1), (("x", "y"), {}, 2)],
    ids=["n", "beams", "equal", "salts"],
)
def test_encoder_runs_once_for_sequences_that_share_and_their_logits_are_the_same(
    kind: str, salts: tuple[str, ...], settings: dict[str, int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, encode = [], Transformer.encode
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(SourceBlocks, "_is_known", lambda *_: False)
        run, sources = running(kind), 0

        def counting(model: Transformer, inputs: StackInput) -> Tensor:
            nonlocal sources
            sources += len(inputs.metadata.q_lens)
            return encode(model, inputs)

        params = SamplingParams(
            max_tokens=8, ignore_eos=True, temperature=float("num_beams" not in settings), **settings
        )
        for number, salt in enumerate(salts):
            source = token_source(prompt(12, 3))
            run.engine.add(Request(f"r{number}", kind, (START,), params, source, cache_salt=salt))
        with monkeypatch.context() as patch:
            patch.setattr(Transformer, "encode", counting)
            run.run()
        found.append((sources, run))
    (shared, ours), (alone, theirs) = found
    assert (shared, alone) == (calls, len(salts) * settings.get("n", 1) if "num_beams" not in settings else 1)
    for name, rows in ours.runner.rows.items():
        for (place, row), (other, expected) in zip(rows, theirs.runner.rows[name], strict=True):
            assert place == other
            assert torch.equal(row, expected)
