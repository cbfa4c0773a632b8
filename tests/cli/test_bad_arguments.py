"""What a caller may get wrong at the facade: one line, a hint, and nothing changed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import tokens

from semblend import ConfigError, InputError, Prompt, SemBlend, SemBlendConfig, StoreError
from semblend.discover.slots import NEVER, to_microseconds

DOCUMENT = tokens(1, 200)


def make(**settings: object) -> SemBlend:
    return SemBlend(SemBlendConfig(embedder="none", metrics=False, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl_s", [-1, float("nan"), float("inf"), 1e300, 10**400, "5", True])
def test_a_time_to_live_that_is_none_registers_nothing(tmp_path, ttl_s):
    with make(store=str(tmp_path / "s")) as sb:
        with pytest.raises(InputError) as caught:
            sb.register(Prompt(DOCUMENT), donor_id="a", ttl_s=ttl_s)
        assert caught.value.hint
        assert sb.stats().donors == sb.stats().tokens == sb.stats().postings == 0
    with make(store=str(tmp_path / "s")) as sb:
        assert sb.donors() == ()


def test_an_expiry_beyond_all_clocks_is_never():
    assert to_microseconds(float("inf")) == to_microseconds(None) == NEVER


@pytest.mark.parametrize("exact_tokens", ["5", 3.5, None, -1, 201])
def test_exact_tokens_that_are_no_count_are_refused(exact_tokens):
    for ask in (make().lookup, make().explain):
        with pytest.raises(InputError):
            ask(Prompt(DOCUMENT), exact_tokens=exact_tokens)


def test_a_count_from_numpy_is_a_count():
    sb = make()
    sb.register(Prompt(DOCUMENT), donor_id="a")
    plan = sb.lookup(Prompt(DOCUMENT), exact_tokens=np.int64(16))
    assert (type(plan.exact_tokens), plan.spans[0].target_start) == (int, 16)


def test_a_request_id_may_hold_any_character_and_must_be_text():
    sb = make(canary_percent=50.0)
    sb.lookup(Prompt(DOCUMENT), request_id="\ud800")
    for wrong in (None, 5, b"r"):
        with pytest.raises(InputError):
            sb.lookup(Prompt(DOCUMENT), request_id=wrong)


@pytest.mark.parametrize("donor_id", ["", None, 5, "\ud800"])
def test_a_donor_id_that_no_file_could_hold_is_refused(donor_id):
    with pytest.raises(InputError):
        make().register(Prompt(DOCUMENT), donor_id=donor_id)


@pytest.mark.parametrize("donor_id", ["a\nb", "é漢🙂", "x" * 10_000, "a\0b", "../../etc", " "])
def test_an_odd_donor_id_comes_back_from_the_file(tmp_path, donor_id):
    with make(store=str(tmp_path / "s")) as sb:
        sb.register(Prompt(DOCUMENT), donor_id=donor_id)
    with make(store=str(tmp_path / "s")) as sb:
        assert sb.lookup(Prompt(DOCUMENT)).donor_ids == (donor_id,)


def test_a_decline_cannot_be_claimed_nor_a_plan_confirmed():
    sb = make()
    with pytest.raises(InputError):
        sb.claim(sb.lookup(Prompt(DOCUMENT)), "r")
    with pytest.raises(InputError):
        sb.confirm(None)
    with pytest.raises(InputError):
        SemBlend({"max_donors": 5})


def test_paths_that_cannot_be_are_errors_with_a_hint():
    with pytest.raises(StoreError):
        make(store="x" * 300)
    with pytest.raises(ConfigError):
        make(store="a\0b")
    with pytest.raises(ConfigError):
        make(donor_ttl_s=float("inf"))


def test_a_store_in_the_home_folder_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with make(store="~/s") as sb:
        sb.register(Prompt(DOCUMENT), donor_id="a")
    assert (tmp_path / "s").is_file()
    assert not (tmp_path / "~").exists()


def list_open(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: others come and go
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith(str(folder))]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
def test_a_start_that_fails_leaves_no_file_open(tmp_path):
    (tmp_path / "s").write_bytes(b"no store " * 500)
    with (tmp_path / "s").open() as held:
        assert list_open(tmp_path) == [held.name]
    with pytest.raises(StoreError):
        make(store=str(tmp_path / "s"), events=str(tmp_path / "events"))
    assert list_open(tmp_path) == []


ALONE = """
from semblend import Prompt, SemBlend, SemBlendConfig
sb = SemBlend(SemBlendConfig(embedder="none", metrics=False))
sb.register(Prompt(range(500)), donor_id="a")
print(sb.lookup(Prompt(range(100, 400))).reused_tokens)
"""


def test_a_numba_that_cannot_be_loaded_leaves_the_work_to_numpy(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('numba needs another numpy')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ALONE}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "300", done.stderr
    assert "another numpy" in done.stderr


def test_a_machine_without_a_folder_for_compiled_kernels_compiles_and_runs():
    script = (
        "import numba\ninner = numba.njit\n"
        "def njit(**options):\n"
        "    if options.get('cache'): raise RuntimeError('cannot cache function: no locator available')\n"
        "    return lambda function: function\n"  # interpreted: compiling everything would take ten seconds
        f"numba.njit = njit\nimport numpy; numpy.seterr(over='ignore')\n{ALONE}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "300", done.stderr
