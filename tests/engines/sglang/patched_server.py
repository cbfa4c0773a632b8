"""A program that starts SGLang itself and has patched it before: the server that a test asks. Flags are SGLang's."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # SGLang starts processes that import this file again
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    from semblend.integration.sglang.radix_patcher import patch_radix_cache

    patch_radix_cache()
    run_server(prepare_server_args(sys.argv[1:]))
