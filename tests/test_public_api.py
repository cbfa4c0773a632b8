"""What `from semblend import …` promises."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("package", ["semblend", "semantickv", "sembench"])
def test_all_is_what_is_exported(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_public_name_has_a_docstring():
    semblend = importlib.import_module("semblend")
    for name in semblend.__all__:
        thing = getattr(semblend, name)
        if callable(thing):
            assert thing.__doc__, name


def test_the_words_of_the_specification_are_there():
    from semblend import Decline, SemBlend, Span

    assert Decline.__match_args__[:2] == ("reason", "detail")
    assert Span.__match_args__[:4] == ("donor_id", "donor_start", "target_start", "length")
    for name in ("register", "lookup", "forget", "explain", "from_env", "claim", "confirm", "warm_up"):
        assert callable(getattr(SemBlend, name))
