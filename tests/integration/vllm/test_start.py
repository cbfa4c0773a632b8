"""Whether an engine can be served, as far as no vLLM is needed to ask."""

from __future__ import annotations

import pytest

from semblend.integration.vllm.start import in_multi_connector
from semblend.integration.vllm.versions import SUPPORTED, Evidence, support


def made_by(module, name="MultiConnector"):
    """What a part learns when an object of this class makes it, two calls up."""

    def make(self):
        return (lambda: in_multi_connector())()

    return type(name, (), {"__module__": module, "make": make})().make()


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", True),
        ("semblend.integration.vllm.beside_others", False),
        ("vllm_of_somebody_else", False),
    ],
)
def test_a_multi_connector_of_vllm_is_found_among_the_callers(module, refused):
    assert made_by(module) is refused


def test_another_owner_among_the_callers_is_no_multi_connector():
    assert not made_by("vllm.v1.core.sched.scheduler", "Scheduler")
    assert not in_multi_connector()


def test_every_known_version_says_how_it_is_known():
    versions = [row.version for row in SUPPORTED]
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))
    assert all(row.evidence is Evidence.RUN and row.note for row in SUPPORTED)
    assert support("0.19.0").evidence is Evidence.NONE
    assert "never looked at" in support("0.19.0").note
