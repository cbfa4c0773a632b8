"""Claim: splicing donor KV into a paged pool runs at 80 % or more of the GPU's copy bandwidth, rotation included.

    PYTHONPATH=src:bench python bench/splice.py            # needs a CUDA GPU, a few minutes
    PYTHONPATH=src:bench python bench/splice.py --quick    # two lengths, one shape

For each shape the same bytes are moved three ways in one run, in turn: torch's contiguous ``copy_`` (the bandwidth to
compare with), the Triton splice (gather, rotate, scatter into shuffled blocks of 16), and its plain twin. GB/s count
each byte twice, read and written. ``launch`` is the whole Python call, tables and checks included; ``kernel`` is the
GPU's own time. Then attention of 10 % scattered rows: our kernel against SDPA with a mask over gathered KV.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _report import Report, fail, progress, spread, version

TARGET = 0.8
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """One model's KV."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def bytes_of(self, tokens: int) -> int:
        """Bytes of K and V of so many tokens in bf16."""
        return 2 * 2 * self.layers * tokens * self.kv_heads * self.head_dim


SHAPES = [Shape("Qwen2.5-7B", 28, 28, 4), Shape("Qwen2.5-1.5B", 28, 12, 2)]
LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "splice")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each cell, in turn")
    args = parser.parse_args()
    torch = _torch()
    report = Report("splice", args)
    device = torch.cuda.get_device_name(0)
    report.add("device", {"gpu": device, "torch": torch.__version__, "triton": version("triton")})
    report.note(f"{device}, torch {torch.__version__}, triton {version('triton')}, bf16, blocks of {BLOCK} tokens")
    runs = 5 if args.quick else args.runs
    shapes, lengths = (SHAPES[:1], [1024, 8192]) if args.quick else (SHAPES, LENGTHS)
    splice_table(report, torch, shapes, lengths, runs, args.seed)
    moves_table(report, torch, shapes[0], runs, args.seed)
    attention_table(report, torch, shapes, [8192] if args.quick else [8192, 24576], runs, args.seed)
    report.write(args.out)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        fail("torch is not installed", hint="pip install 'semblend-suite[gpu]'")
    if not torch.cuda.is_available():
        fail("no CUDA device: this measures GPU kernels", hint="run it on a machine with a GPU; the tests need none")
    if version("triton") is None:
        fail("triton is not installed", hint="pip install 'semblend-suite[gpu]'")
    return torch


def splice_table(report: Report, torch: Any, shapes: list[Shape], lengths: list[int], runs: int, seed: int) -> None:
    rows = []
    for shape in shapes:
        for tokens in lengths:
            progress(f"splice {shape.name} {tokens}")
            scene = Scene(torch, shape, tokens, moves=4, seed=seed)
            scene.verify()
            ms = in_turn(torch, {"copy": scene.copy, "kernel": scene.kernel, "plain": scene.plain}, runs)
            launch = wall_ms(torch, scene.kernel, runs)
            gbs = {name: 2 * shape.bytes_of(tokens) / spread(samples)["p50"] / 1e6 for name, samples in ms.items()}
            share = gbs["kernel"] / gbs["copy"]
            row = [shape.name, tokens, shape.bytes_of(tokens) / 1e6, gbs["copy"], gbs["kernel"], share, share >= TARGET]
            rows.append([*row, gbs["plain"], spread(ms["kernel"])["p50"], spread(launch)["p50"]])
    columns = ["shape", "tokens", "MB", "copy GB/s", "splice GB/s", "share", ">= 80 %", "plain GB/s"]
    report.table("Splice against a contiguous copy", [*columns, "kernel ms", "launch ms"], rows)
    report.note(f"medians of {runs} runs in turn; share = splice / copy of the same bytes; 4 moves of different shifts")


def moves_table(report: Report, torch: Any, shape: Shape, runs: int, seed: int) -> None:
    """Does the number of moves matter? 8,192 tokens in one piece and in many."""
    rows = []
    for moves in (1, 16, 128):
        scene = Scene(torch, shape, 8192, moves=moves, seed=seed)
        ms = in_turn(torch, {"copy": scene.copy, "kernel": scene.kernel}, runs)
        copy, kernel = (spread(ms[name])["p50"] for name in ("copy", "kernel"))
        rows.append([moves, kernel, copy / kernel, spread(wall_ms(torch, scene.kernel, runs))["p50"]])
    report.table(f"{shape.name}, 8,192 tokens in so many moves", ["moves", "kernel ms", "share", "launch ms"], rows)


class Scene:
    """A donor and a pool of one shape, and the three ways to bring the one into the other."""

    def __init__(self, torch: Any, shape: Shape, tokens: int, moves: int, seed: int) -> None:
        from semblend.materialize.kv.layout import KvLayout
        from semblend.materialize.kv.moves import DonorTensors, Move
        from semblend.materialize.kv.rope import RopeSpec

        self.torch = torch
        made = torch.Generator(device="cuda").manual_seed(seed)
        size = (shape.layers, tokens, shape.kv_heads, shape.head_dim)
        k, v = (torch.randn(size, generator=made, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        blocks = 2 * tokens // BLOCK
        room = (shape.layers, blocks * BLOCK, shape.kv_heads, shape.head_dim)
        self.pool_k, self.pool_v = (torch.zeros(room, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.layout = KvLayout.of_pool(self.pool_k, self.pool_v)
        self.rope = RopeSpec.plain(shape.head_dim, theta=1e6)
        order = torch.randperm(blocks, generator=made, device="cuda")[: tokens // BLOCK]
        slots = (order[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
        self.donor = DonorTensors(k, v)
        each = tokens // moves
        self.moves = [
            Move(self.donor, i * each, each, slots[i * each : (i + 1) * each], 137 * (i + 1)) for i in range(moves)
        ]
        self.to = [torch.empty_like(k), torch.empty_like(v)]

    def copy(self) -> None:
        self.to[0].copy_(self.donor.k)
        self.to[1].copy_(self.donor.v)

    def kernel(self) -> None:
        from semblend.materialize.kv.splice import splice

        splice(self.moves, self.layout, self.rope, check_slots=False)

    def plain(self) -> None:
        from semblend.materialize.kv.splice import splice_plain

        splice_plain(self.moves, self.layout, self.rope)

    def verify(self) -> None:
        """Kernel and twin write the same bytes, up to one rounding of bf16: a fast wrong answer counts for nothing."""
        self.plain()
        want = self.pool_k.clone(), self.pool_v.clone()
        self.pool_k.zero_()
        self.pool_v.zero_()
        self.kernel()
        self.torch.testing.assert_close(self.pool_k, want[0], rtol=1e-2, atol=1e-2)
        if not self.torch.equal(self.pool_v, want[1]):
            fail("the kernel's values differ from the twin's", hint="run tests/materialize/kernel_cases.py on this GPU")


def attention_table(report: Report, torch: Any, shapes: list[Shape], lengths: list[int], runs: int, seed: int) -> None:
    from semblend.materialize.kv.attention_kernels import scattered_attention

    rows = []
    for shape in shapes:
        for tokens in lengths:
            for share in (0.01, 0.1):
                progress(f"attention {shape.name} {tokens} {share}")
                q, positions, context, k, v = attention_scene(torch, shape, tokens, share, seed)
                scale = shape.head_dim**-0.5
                mask = torch.arange(tokens, device="cuda")[None] <= positions[:, None]
                group = shape.heads // shape.kv_heads

                def ours(
                    q: Any = q, p: Any = positions, c: Any = context, k: Any = k, v: Any = v, s: float = scale
                ) -> Any:
                    return scattered_attention(q, p, c, k, v, s)

                def sdpa(q: Any = q, c: Any = context, k: Any = k, v: Any = v, m: Any = mask, g: int = group) -> Any:
                    keys, values = (x[c].transpose(0, 1).repeat_interleave(g, 0)[None] for x in (k, v))
                    out = torch.nn.functional.scaled_dot_product_attention(
                        q.transpose(0, 1)[None], keys, values, attn_mask=m[None, None]
                    )
                    return out[0].transpose(0, 1)

                torch.testing.assert_close(ours(), sdpa(), rtol=2e-2, atol=2e-2)
                ms = in_turn(torch, {"ours": ours, "sdpa": sdpa}, runs)
                mine, theirs = spread(ms["ours"])["p50"], spread(ms["sdpa"])["p50"]
                flops = 4 * shape.heads * shape.head_dim * float((positions + 1).sum())
                rows.append([shape.name, tokens, len(positions), mine, theirs, theirs / mine, flops / mine / 1e9])
    columns = ["shape", "context", "rows", "ours ms", "SDPA ms", "speed-up", "ours TFLOP/s"]
    report.table("Attention of scattered rows, one layer", columns, rows)
    report.note(
        "SDPA gets gathered KV, repeated for its query heads, and a mask; the gather counts, as ours gathers too"
    )


def attention_scene(torch: Any, shape: Shape, tokens: int, share: float, seed: int) -> tuple[Any, ...]:
    made = torch.Generator(device="cuda").manual_seed(seed)
    count = int(tokens * share)
    positions = torch.randperm(tokens, generator=made, device="cuda")[:count].sort().values
    context = torch.randperm(tokens // BLOCK, generator=made, device="cuda")[:, None] * BLOCK
    context = (context + torch.arange(BLOCK, device="cuda")).flatten()
    k, v = (
        torch.randn(tokens, shape.kv_heads, shape.head_dim, generator=made, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    q = torch.randn(count, shape.heads, shape.head_dim, generator=made, device="cuda", dtype=torch.bfloat16)
    return q, positions, context, k, v


def in_turn(torch: Any, ways: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """GPU milliseconds of every way, one after the other in each round, so that drift hits all alike.

    A sleep on the GPU before each way lets the host enqueue it whole: otherwise launch time would be measured.
    """
    for way in ways.values():
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(3_000_000)
            begin.record()
            way()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end))
    return found


def wall_ms(torch: Any, way: Callable[[], Any], runs: int) -> list[float]:
    """What a caller waits for: from the call until the GPU is done."""
    found = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return found


if __name__ == "__main__":
    main()
