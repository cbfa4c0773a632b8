"""What the tests in all real engines have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def everything_is_begun() -> Iterator[None]:
    """Small models need not pay and no request is drawn for the control group: what can be reused is reused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEMBLEND_LEARN_COSTS", "0")
        patch.setenv("SEMBLEND_CONTROL_SHARE", "0")
        yield
