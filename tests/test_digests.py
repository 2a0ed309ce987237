"""Results keep their bits on machines whose digests are recorded."""

from __future__ import annotations

import json

import pytest

from tests import digests


@pytest.mark.slow
def test_nothing_that_is_computed_has_changed() -> None:
    known = json.loads(digests.FILE.read_text()).get(digests.machine())
    if known is None:
        pytest.skip(f"no digests of this machine: {digests.machine()}")
    assert dict(digests.digests()) == known
