"""What tests of the service share."""

from __future__ import annotations

import pytest
from huggingface_hub import constants


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests tell huggingface_hub that it is offline, for `transformers`; its clients talk to this machine here."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
