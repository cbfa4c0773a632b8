"""Measures the shape of a checkout: ``python -m tools.house [CHECKOUT]`` prints a table, one number a line.

Modules a folder, the longest modules and functions, circles of imports (late imports counted), lines that stand twice,
lines of source and words of documentation.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("semblend", "semantickv", "sembench")
WINDOW = 6
"""A run of this many lines that stands twice counts as duplicated."""


def find_modules(checkout: Path) -> dict[str, Path]:
    """Every module of the three packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((checkout / "src" / package).rglob("*.py")):
            parts = path.relative_to(checkout / "src").with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def find_functions(path: Path) -> Iterator[tuple[int, str]]:
    """Length in lines and name of every function of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def find_imports(path: Path, known: set[str]) -> set[str]:
    """The known modules that a file imports; of ``from package import module`` the module alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & known) | ({node.module or ""} if full - known else set())
    return found & known


def count_circles(modules: dict[str, Path]) -> int:
    """How many modules can be reached from themselves by imports."""
    edges = {name: find_imports(path, set(modules)) - {name} for name, path in modules.items()}
    circular = 0
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += edges[name]
        circular += start in seen
    return circular


def count_duplicated_lines(modules: dict[str, Path]) -> int:
    """Lines inside runs of `WINDOW` equal lines that stand twice; blank, comment and import lines do not count."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, path in modules.items():
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        kept = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
        for at in range(len(kept) - WINDOW + 1):
            window = tuple(kept[at : at + WINDOW])
            if sum(len(line) for line in window) > 60:  # closing brackets alone are no repetition
                places[window].append((name, at))
    covered = {
        (name, at + i) for found in places.values() if len(found) > 1 for name, at in found for i in range(WINDOW)
    }
    return len(covered)


def count_code_lines(path: Path) -> int:
    """Lines of a module that are neither blank nor comment nor docstring."""
    text = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        number not in prose and bool(line.strip()) and not line.strip().startswith("#") for number, line in lines
    )


def count_words(checkout: Path) -> tuple[int, int, int]:
    """Words of README, of pages for users (guides and concepts), of all documentation."""
    pages = {
        path: len(re.findall(r"\S+", path.read_text(encoding="utf-8"))) for path in (checkout / "docs").rglob("*.md")
    }
    users = sum(words for path, words in pages.items() if path.parent.name in ("guides", "concepts"))
    readme = len(re.findall(r"\S+", (checkout / "README.md").read_text(encoding="utf-8")))
    return readme, users, readme + sum(pages.values())


def measure(checkout: Path) -> dict[str, object]:
    """All figures of a checkout, by name."""
    modules = find_modules(checkout)
    lengths = {name: path.read_text(encoding="utf-8").count("\n") for name, path in modules.items()}
    functions = sorted(
        ((length, f"{name}.{function}") for name, path in modules.items() for length, function in find_functions(path)),
        reverse=True,
    )
    folders = Counter(
        str(path.parent.relative_to(checkout / "src")) for path in modules.values() if path.stem != "__init__"
    )
    readme, users, words = count_words(checkout)
    user_pages = [page for folder in ("guides", "concepts") for page in (checkout / "docs" / folder).glob("*.md")]
    found: dict[str, object] = {
        "modules": len(modules),
        "folders": len(folders),
        "most modules in a folder": ", ".join(f"{name} {count}" for name, count in folders.most_common(3)),
        "longest modules": ", ".join(f"{n} {lengths[n]}" for n in sorted(lengths, key=lengths.__getitem__)[:-4:-1]),
        "longest functions": ", ".join(f"{name} {length}" for length, name in functions[:3]),
        "functions above 60 lines": sum(length > 60 for length, _ in functions),
        "modules in import circles": count_circles(modules),
        "duplicated lines": count_duplicated_lines(modules),
        "lines of source": sum(lengths.values()),
        "of these code (no docstrings, comments, blanks)": sum(map(count_code_lines, modules.values())),
    }
    for package in PACKAGES:
        found[f"lines of {package}"] = sum(n for name, n in lengths.items() if name.split(".")[0] == package)
    found |= {
        "words of README": readme,
        "pages for users": len(user_pages),
        "words for users": users,
        "words in all": words,
    }
    return found


def main() -> int:
    checkouts = [Path(word) for word in sys.argv[1:]] or [Path(__file__).parents[1]]
    tables = [measure(checkout) for checkout in checkouts]
    for name in tables[0]:
        print(f"| {name} | {' | '.join(str(table[name]) for table in tables)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
