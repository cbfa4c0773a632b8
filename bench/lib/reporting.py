"""What every script in bench/ shares: one thread, a table on stdout, JSON on disk, and where the numbers come from.

Import this module before numpy (``import lib.reporting as reporting``): it holds the numeric libraries to one thread,
and they read that setting only once, when they are loaded.

    report = Report("recall", args)
    report.table("Recall by class", ["class", "n", "recovered"], [["reorder", 40, 0.998]])
    report.note("n = queries; recovered = share of the shared tokens that the plan covers")
    report.write(args.out)
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
for _variable in THREAD_VARIABLES:
    os.environ[_variable] = "false" if _variable == "TOKENIZERS_PARALLELISM" else "1"

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "bench" / "results"
DATA_VARIABLE = "SEMBLEND_TEST_DATA"
RESULT_SCHEMA = "semblend.bench.v1"
LIBRARIES = ("numpy", "numba", "semblend-suite", "tokenizers")


class Report:
    """The tables and notes of one run; prints as it goes, writes once at the end."""

    def __init__(self, name: str, args: argparse.Namespace | None = None) -> None:
        self.name = name
        self.args = {key: _plain(value) for key, value in vars(args).items()} if args is not None else {}
        self.tables: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.extra: dict[str, Any] = {}
        self.started = datetime.now(UTC)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints a Markdown table and keeps the rows, unrounded, for the JSON."""
        kept = [list(row) for row in rows]
        for row in kept:
            if len(row) != len(columns):
                raise ValueError(f"table {title!r}: a row has {len(row)} cells for {len(columns)} columns")
        self.tables.append(
            {"title": title, "columns": list(columns), "rows": [[_plain(cell) for cell in row] for row in kept]}
        )
        print(f"\n{title}\n{format_table(columns, kept)}", flush=True)

    def note(self, text: str) -> None:
        """A sentence that belongs to the numbers: printed below them and written with them."""
        self.notes.append(text)
        print(f"- {text}", flush=True)

    def add(self, key: str, value: Any) -> None:
        """A value for the JSON alone (raw samples, per-query rows)."""
        self.extra[key] = _plain(value)

    def write(self, path: str | Path | None) -> Path | None:
        """Writes the JSON beside its final name, then renames: a killed run leaves the last good file alone."""
        if not path:
            return None
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, target)
        progress(f"wrote {target}")
        return target

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": RESULT_SCHEMA,
            "name": self.name,
            "provenance": provenance(self.started, self._wall, self._cpu),
            "arguments": self.args,
            "tables": self.tables,
            "notes": self.notes,
            **self.extra,
        }


def provenance(started: datetime, wall_start: float, cpu_start: float) -> dict[str, Any]:
    """Which machine, which code, when, and how much of the wall time was really ours."""
    wall, cpu = time.perf_counter() - wall_start, time.process_time() - cpu_start
    return {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", *(_portable(word) for word in sys.argv)]),
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "cpu_model": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "threads": 1,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "cpu_share": round(cpu / wall, 3) if wall > 0 else None,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def get_day(result: dict[str, Any]) -> str:
    """When the rows of a result were measured: as its script was told, or when it was written."""
    return str(result.get("arguments", {}).get("measured_at") or result["provenance"]["date"])


def find_result(name: str) -> Path:
    """The result file of that name: of a script that stands here, or of an experiment that was run once."""
    found = [*RESULTS.glob(f"{name}.json"), *REPO.glob(f"research/*/results/{name}.json")]
    if len(found) != 1:
        raise SystemExit(f"error: no result is called {name} (hint: ls bench/results research/*/results)")
    return found[0]


def read_lines_of(result: dict[str, Any], title: str) -> list[dict[str, Any]]:
    """The rows of the first table with these words in its title, by column."""
    table = next(table for table in result["tables"] if title in table["title"])
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def add_common_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The flags that every script here understands in the same way."""
    parser.add_argument("--data-dir", default=None, help=f"folder with the real data (default: ${DATA_VARIABLE})")
    parser.add_argument("--tokenizer", default="stable", help="'stable' (built in) or a path to a tokenizer.json")
    parser.add_argument("--seed", type=int, default=20, help="seed of every random choice")
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    parser.add_argument("--out", default=f"bench/results/{name}.json", help="JSON result file; '' writes none")


def data_dir(args: argparse.Namespace) -> Path:
    """The data folder, or a one-line error and exit code 2."""
    given = args.data_dir or os.environ.get(DATA_VARIABLE)
    if not given:
        fail("no data folder given", hint=f"pass --data-dir or set {DATA_VARIABLE}")
    folder = Path(given)
    if not folder.is_dir():
        fail(f"{folder} is not a folder", hint=f"pass --data-dir or set {DATA_VARIABLE}")
    return folder


def fail(message: str, *, hint: str) -> NoReturn:
    print(f"error: {message} (hint: {hint})", file=sys.stderr)
    raise SystemExit(2)


def read_lines(path: Path) -> list[str]:
    """The lines of a file, packed or not; none where there is no file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(samples: Sequence[float]) -> dict[str, float | int | None]:
    """Median with its spread: p05, p50, p95, min, max and n; all None when there is no sample.

    >>> spread([3.0, 1.0, 2.0])["p50"]
    2.0
    """
    ordered = sorted(samples)
    if not ordered:
        return {"n": 0, "min": None, "p05": None, "p50": None, "p95": None, "max": None}
    return {
        "n": len(ordered),
        "min": ordered[0],
        "p05": percentile(ordered, 5),
        "p50": percentile(ordered, 50),
        "p95": percentile(ordered, 95),
        "max": ordered[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks of an already sorted sequence."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (at - low))


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too.

    >>> print(format_table(["class", "n"], [["reorder", 40]]))
    | class   |  n |
    |---------|---:|
    | reorder | 40 |
    """
    cells = [[format_cell(cell) for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    numeric = [
        all(row[i] is None or isinstance(row[i], (int, float)) for row in rows) and bool(rows)
        for i in range(len(columns))
    ]

    def line(words: Sequence[str]) -> str:
        padded = (word.rjust(w) if n else word.ljust(w) for word, w, n in zip(words, widths, numeric, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)) + "|"
    return "\n".join([line(list(columns)), rule, *(line(row) for row in cells)])


def format_cell(value: Any) -> str:
    """Thousands separated, floats to three figures that matter, None as a dash (missing is not zero)."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else _decimals(value, size)
    return str(value)


def _decimals(value: float, size: float) -> str:
    if 0.99 < value < 1:  # a share that is not whole must not be rounded up to 1
        return f"{min(value, 0.99999):.5f}"
    return f"{value:.2f}" if size >= 10 else f"{value:.3f}" if size >= 0.1 or size == 0 else f"{value:.4f}"


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform module knows less, but something
    return platform.processor() or platform.machine()


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _portable(word: str) -> str:
    """An absolute path tells about one machine only: keep what is inside the repository, else the last name."""
    flag, _, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    if not value.startswith(os.sep):
        return word
    path = Path(value)
    short = str(path.relative_to(REPO)) if path.is_relative_to(REPO) else f"…/{path.name}"
    return f"{flag}={short}" if flag else short


def _plain(value: Any) -> Any:
    """Numpy scalars, paths and tuples as JSON knows them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return _portable(str(value))
    if isinstance(value, str):
        return _portable(value)
    return value.item() if hasattr(value, "item") else value
