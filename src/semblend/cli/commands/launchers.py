"""`semblend-sglang` and `semblend-trtllm`: another engine's server with our reuse. Their ``--help`` needs no engine."""

from __future__ import annotations


def sglang() -> None:
    from semblend.integration.sglang.launcher import main

    main()


def trtllm() -> None:
    from semblend.integration.trtllm.launcher import main

    main()
