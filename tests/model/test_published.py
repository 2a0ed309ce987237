"""Published models from their config.json alone: every setting is understood, and parameter counts are right.

The files are copies of the published ones, without names, paths, versions and label tables. A figure counts a tied
matrix once. Each figure was also compared with `transformers`' class (5.x, meta device). Where one counts parameters
that another does not, the row has their number and the reason.
"""

from __future__ import annotations

import json

import pytest

from tests.model.published_decoders import PUBLISHED_DECODERS
from tests.model.published_encoders import NOMIC, PUBLISHED_ENCODERS
from tests.model.published_experts import PUBLISHED_EXPERTS
from tests.model.published_gemmas import PUBLISHED_GEMMAS
from tests.model.published_layernorm_decoders import PUBLISHED_LAYERNORM_DECODERS
from tests.model.published_more_decoders import PUBLISHED_MORE_DECODERS
from tests.model.published_seq2seq import PUBLISHED_SEQ2SEQ
from tests.model.published_speech import PUBLISHED_SPEECH
from tests.model.published_text_parts import PUBLISHED_TEXT_PARTS
from triptych.model.families import config_from_raw
from triptych.model.inspection.anatomy import dissect

PUBLISHED = {
    **PUBLISHED_DECODERS,
    **PUBLISHED_LAYERNORM_DECODERS,
    **PUBLISHED_GEMMAS,
    **PUBLISHED_EXPERTS,
    **PUBLISHED_SEQ2SEQ,
    **PUBLISHED_ENCODERS,
    **PUBLISHED_SPEECH,
    **PUBLISHED_MORE_DECODERS,
    **PUBLISHED_TEXT_PARTS,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    row = PUBLISHED[name]
    anatomy = dissect(config_from_raw(json.loads(row.config)))
    total = anatomy.total_parameters - anatomy.parameters.get("masked_head", 0)  # no figure of an encoder counts it
    assert total == row.parameters - row.not_ours


@pytest.mark.parametrize(("factor", "longest"), [(None, 8192), (2, 2048)])
def test_nomic_reads_no_text_whose_rotary_base_would_depend_on_its_length(factor: int | None, longest: int) -> None:
    config = config_from_raw({**json.loads(NOMIC), "rotary_scaling_factor": factor})
    assert config.max_positions == longest
