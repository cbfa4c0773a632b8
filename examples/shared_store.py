"""Two processes, one store file: what one registers the other finds after refresh(); a restart finds it too.

python examples/shared_store.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from semblend import Prompt, SemBlend, SemBlendConfig

REPORT = range(20_000, 22_000)
OTHER_PROCESS = """
import sys
from semblend import Prompt, SemBlend, SemBlendConfig
with SemBlend(SemBlendConfig(store=sys.argv[1])) as sb:
    donor = sb.register(Prompt(range(20_000, 22_000)), donor_id="written-elsewhere")
    print(f"other process: registered {donor.donor_id}, {donor.token_count} tokens")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "donors.semblend"
        with SemBlend(SemBlendConfig(store=str(store))) as sb:
            print(f"this process: {len(sb.donors())} donors at first")
            other = [sys.executable, "-c", OTHER_PROCESS, str(store)]
            print(subprocess.run(other, check=True, capture_output=True, text=True).stdout.strip())
            print(f"this process: {len(sb.donors())} donors before refresh, {sb.refresh()} taken over by it")
            print(f"this process: {sb.lookup(Prompt(REPORT)).reused_tokens} tokens found")

        with SemBlend(SemBlendConfig(store=str(store))) as again:
            print(f"after a restart: {again.lookup(Prompt(REPORT)).reused_tokens} tokens found")
            again.forget("written-elsewhere")
        print(f"the file is mode {store.stat().st_mode & 0o777:o}")


if __name__ == "__main__":
    main()
