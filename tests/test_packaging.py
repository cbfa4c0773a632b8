"""The source distribution holds what the wheel needs, and the wheel holds every file of the three packages."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BESIDE = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
FOLDERS = ("src", "constraints", "configs", "examples")
MADE = ("__pycache__", "*.pyc", "*.nbi", "*.nbc", "*.egg-info")


def run_backend(call: str, folder: Path) -> None:
    """One call of the build backend, as `python -m build` makes it, without an environment of its own."""
    code = f"from setuptools import build_meta; build_meta.{call}('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what was built or compiled before: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in BESIDE:
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*MADE))
    return folder


@pytest.fixture(scope="module")
def unpacked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of that copy, unpacked."""
    run_backend("build_sdist", checkout)
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)  # Python 3.11.0 has none
        packed.extractall(folder)
    (inside,) = folder.iterdir()
    return inside


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> zipfile.ZipFile:
    """The wheel that is built from the unpacked source distribution alone."""
    run_backend("build_wheel", unpacked)
    (path,) = (unpacked / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_source_distribution_has_what_the_readme_names_beside_the_packages(checkout: Path, unpacked: Path) -> None:
    for name in ("constraints", "configs", "examples"):
        assert list_files(checkout / name) == list_files(unpacked / name)
    assert {"LICENSE", "CHANGELOG.md", "CITATION.cff"} <= list_files(unpacked)
    assert not (unpacked / "tests").exists(), "a part of the tests is no use to anybody"


def test_the_wheel_built_from_it_holds_every_file_of_the_packages(checkout: Path, wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    written = {name for name in list_files(checkout / "src") if ".egg-info/" not in name}
    assert files == written


def test_type_checkers_are_told_that_all_three_packages_have_types(wheel: zipfile.ZipFile) -> None:
    assert {"semblend/py.typed", "semantickv/py.typed", "sembench/py.typed"} <= set(wheel.namelist())


def test_the_wheel_names_the_version_and_the_commands_of_this_checkout(wheel: zipfile.ZipFile) -> None:
    from semblend import __version__

    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert entry.startswith(f"semblend_suite-{__version__}.dist-info/")
    told = wheel.read(entry).decode()
    for program in ("semblend", "semantickv", "sembench", "semblend-sglang", "semblend-trtllm"):
        assert f"\n{program} = " in told


def test_every_pinned_version_takes_the_oldest_python_that_the_readme_allows() -> None:
    specifiers = pytest.importorskip("packaging.specifiers")
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints" / "core.txt").read_text("utf-8"), re.M)
    installed = {one.name.lower().replace("_", "-"): one for one in importlib.metadata.distributions()}
    checked = 0
    for name, version in pins:
        found = installed.get(name.lower().replace("_", "-"))
        if found is None or found.version.partition("+")[0] != version:
            continue
        checked += 1
        asked = found.metadata["Requires-Python"] or ""
        assert specifiers.SpecifierSet(asked).contains("3.11.0"), f"{name} {version} wants Python {asked}"
    assert checked > 50, "this environment was not made from the pins"
