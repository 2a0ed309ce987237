"""Properties of each position scheme."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model.checkpoints import CPU, loaded, prompt, saved
from triptych.model.api.request import token_source
from triptych.model.attention.base import AttentionMetadata, SegmentGroup
from triptych.model.config.attention import AlibiConfig, BucketBiasConfig, DisentangledConfig, RotaryConfig
from triptych.model.config.stack import PositionConfig, PositionKind
from triptych.model.engine.execution.sources import source_input
from triptych.model.network.disentangled import relative_rows
from triptych.model.network.embeddings import LearnedPositions, SinusoidalPositions
from triptych.model.network.fused_ops import rotary_tables
from triptych.model.network.positions import (
    AlibiBias,
    BucketBias,
    StepBias,
    inverse_frequencies,
    rotary_frequencies,
    rotate,
)

SINUSOIDAL = PositionConfig(PositionKind.SINUSOIDAL)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("distance", [0, 1, 5, 40])
def test_a_rotary_score_depends_on_the_difference_of_positions_only(theta: float, distance: int) -> None:
    torch.manual_seed(0)
    rotary = RotaryConfig(16, theta)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at: int) -> float:
        turned = [
            rotate(x, rotary_tables(rotary, torch.tensor([p]), torch.float32)) for x, p in ((q, at + distance), (k, at))
        ]
        return float((turned[0] * turned[1]).sum())

    scores = [score(at) for at in (0, 1, 17, 300)]
    assert max(scores) - min(scores) < 1e-3
    if distance:
        assert abs(scores[0] - float((q * k).sum())) > 1e-3


def test_rotation_keeps_lengths() -> None:
    x = torch.randn(4, 2, 8)
    rotary = RotaryConfig(8)
    turned = rotate(x, rotary_tables(rotary, torch.tensor([0, 3, 50, 1000]), torch.float32))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])


def test_what_recorded_steps_read_is_kept_whatever_is_loaded_later() -> None:
    """A CUDA graph stores addresses and keeps nothing alive."""
    cpu = torch.device("cpu")

    def tables(number: int) -> tuple[torch.Tensor, ...]:
        slopes = AlibiBias(AlibiConfig((1.0, 1.0 + number))).slopes(cpu)
        rotary = RotaryConfig(8, 100.0 + number)
        return slopes, rotary_frequencies(rotary, cpu), inverse_frequencies(rotary.theta, 8, cpu)

    first = tables(0)
    for number in range(1, 200):
        tables(number)
    assert all(one is other for one, other in zip(first, tables(0), strict=True))


def test_sinusoids_follow_the_papers_formula() -> None:
    size = 12
    table = SinusoidalPositions(SINUSOIDAL, size)(torch.tensor([0, 1, 2, 77]))
    for row, t in enumerate((0, 1, 2, 77)):
        for k in range(size // 2):
            angle = t / 10_000 ** (2 * k / size)
            assert table[row, k].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, size // 2 + k].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (16, 64)])
def test_buckets_equal_transformers(bidirectional: bool, buckets: int, far: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    config = BucketBiasConfig(buckets, far)
    distance = torch.arange(-400, 401)
    ours = BucketBias(config, 1, bidirectional=bidirectional).bucket(distance)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, far)
    assert torch.equal(ours, theirs)
    assert ours.max() == (buckets - 1)


@pytest.mark.parametrize(("span", "far"), [(256, 512), (6, 16), (32, 1680)])
def test_rows_of_relative_positions_equal_transformers(span: int, far: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = torch.arange(-far - 50, far + 51)
    buckets = make_log_bucket_position(distances, span, far).long()
    rows = relative_rows(DisentangledConfig(span, far), distances)
    assert torch.equal(rows, (buckets + span).clamp(0, 2 * span - 1))


def test_a_learned_table_is_read_behind_its_offset() -> None:
    learned = LearnedPositions(PositionConfig(PositionKind.LEARNED, max_positions=4, offset=2), 3)
    with torch.no_grad():
        learned.weight.copy_(torch.arange(18).view(6, 3))
        assert torch.equal(learned(torch.tensor([0, 3]))[:, 0], torch.tensor([6.0, 15.0]))


def test_a_step_bias_is_computed_once_for_the_same_positions() -> None:
    calls = []

    def bias(query: torch.Tensor, key: torch.Tensor, group: SegmentGroup) -> torch.Tensor:
        calls.append(group)
        return group.k_positions + 0

    first, second = (AttentionMetadata((length,), (length,), causal=True).groups[0] for length in (2, 5))
    step, query = StepBias(bias), torch.zeros(1, 2, 1, 1)
    assert step(query, query, first) is step(query, query, first)
    assert len(step(query, query, second)) == 5
    assert calls == [first, second]


def test_a_step_bias_makes_one_table_by_distance_where_its_bias_has_one() -> None:
    bias = BucketBias(BucketBiasConfig(), 2, bidirectional=False)
    step = StepBias(bias)
    assert step.by_distance() is step.by_distance()
    assert StepBias(lambda query, key, group: query).by_distance() is None


@pytest.mark.parametrize(
    "kind",
    [
        *("roberta", "camembert", "xlm-roberta-xl", "mpnet", "data2vec-text", "roberta-prelayernorm", "esm-learned"),
        *("m2m-100", "m2m-100-other-pad"),
        *("bert", "esm", "jina-v3", "bart"),  # where it is a token like others
    ],
)
@torch.inference_mode()
def test_padding_in_a_text_has_the_position_that_transformers_gives_it(kind: str) -> None:
    """A text that spells `<pad>` has it: RoBERTa and its like count the other tokens alone."""
    model, reference = loaded(kind), saved(kind).reference
    pad = reference.config.pad_token_id
    texts = [(5, 6, pad, 7, 8), (pad, 9), prompt(6), (8, 9, pad, pad)]
    inputs = source_input([token_source(ids) for ids in texts], CPU, padding=model.config.source_padding)
    encoder = reference.get_encoder() if model.decoder is not None else reference
    for ids, found in zip(texts, model.encode(inputs).split([len(ids) for ids in texts]), strict=True):
        expected = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
