"""Run every benchmark, one after the other, each in a process of its own; the tables go to stdout.

    python bench/run_all.py                   # everything; needs the data folder for real text
    python bench/run_all.py --quick           # small runs that show that everything works
    python bench/run_all.py speed recall      # some of them

What a run wrote to bench/results/ stays when a later script fails, and scripts already done can be left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("speed", "recall", "natural", "peers", "faults", "evidence", "vector_index", "sembench_offline", "eviction")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="script", help=f"any of {', '.join(SCRIPTS)}; default all")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.scripts) - set(SCRIPTS):
        parser.error(f"unknown script {sorted(unknown)[0]!r} (hint: one of {', '.join(SCRIPTS)})")
    failed = []
    for name in args.scripts or SCRIPTS:
        started = time.monotonic()
        print(f"\n## {name}\n", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if args.quick else [])]
        code = subprocess.run(command, cwd=HERE.parent, check=False).returncode
        print(f"{name}: exit {code} after {time.monotonic() - started:.0f} s", file=sys.stderr)
        if code:
            failed.append(name)
    if failed:
        print(f"error: {', '.join(failed)} missed a target or failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
