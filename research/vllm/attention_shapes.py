"""How long our attention of scattered rows takes on a GPU, by tile and by parts of the context.

    PYTHONPATH=src python research/vllm/attention_shapes.py OUT.jsonl

Microseconds a layer, of ten calls in a CUDA graph, the best of five replays. Rows as passes have them: `few` is mode fast
(32 rows scattered, 32 at the end); `near uniform` and `near clustered` are a repair of a tenth behind FlashAttention
for groups of 128 (rows all over the prompt; rows at its beginning and its end, so that one group has a long way).
"""

from __future__ import annotations

import json
import sys
import time

import torch

from semblend.materialize.kv import attention_kernels as kernels
from semblend.materialize.kv.attention_kernels import Attended, scattered_attention

LONGEST, GROUP_ROWS = 25_088, 128


def draw_case(heads: int, kv_heads: int, rows: list[int], total: int, padded: int):
    made = torch.Generator(device="cuda").manual_seed(0)
    blocks = LONGEST // 16
    k, v = (
        torch.randn(blocks, 16, kv_heads, 128, generator=made, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    order = torch.randperm(blocks, generator=made, device="cuda")
    context = (order[:, None] * 16 + torch.arange(16, device="cuda")).flatten()
    q = torch.randn(len(rows), heads, 128, generator=made, device="cuda", dtype=torch.bfloat16)
    context[total:] = 0
    return q, torch.tensor(rows, device="cuda"), context[:padded], k, v, 128**-0.5


def attend_reference(q, positions, context, k, v, scale):
    kv_heads = k.shape[2]
    keys, values = (x.flatten(0, 1)[context].float() for x in (k, v))
    found = []
    for row, at in zip(q, positions.tolist(), strict=True):
        asked = row.float().view(kv_heads, -1, 128)
        weights = (torch.einsum("hgd,thd->hgt", asked, keys[: at + 1]) * scale).softmax(-1)
        found.append(torch.einsum("hgt,thd->hgd", weights, values[: at + 1]).flatten(0, 1))
    return torch.stack(found)


def attend_far(case, first):
    """What FlashAttention would have given for the keys before ``first``."""
    q, _, context, k, v, scale = case
    kv_heads = k.shape[2]
    keys, values = (x.flatten(0, 1)[context].float() for x in (k, v))
    outs, sums = [], []
    for row, at in zip(q, first.tolist(), strict=True):
        scores = torch.einsum("hgd,thd->hgt", row.float().view(kv_heads, -1, 128), keys[:at]) * scale
        outs.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), values[:at]).flatten(0, 1))
        sums.append(scores.logsumexp(-1).flatten())
    return Attended(first, torch.stack(outs).flip(0).to(q.dtype), torch.stack(sums).flip(0).T.contiguous())


def time_calls(run) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    best = float("inf")
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 10 * 1e3)
    return best


def main() -> None:
    out = open(sys.argv[1], "a", encoding="utf-8")
    begun, choose = time.monotonic(), kernels._choose_shape

    def note(**row) -> None:
        print(row, flush=True)
        out.write(json.dumps(row) + "\n")
        out.flush()

    few_shapes = [(64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (64, 128, 8, 3)]
    near_shapes = [(64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 3), (64, 64, 4, 2)]
    for heads, kv_heads in ((12, 2), (28, 4)):
        for count, parts_of_tokens in ((64, (1024, 512, 256, 128)), (128, (2048, 1024, 512, 256))):
            for shape in few_shapes if (heads, count) == (12, 64) else few_shapes[:4:2]:
                kernels._choose_shape = lambda *_, shape=shape, **__: kernels._Shape(*shape)
                for total in (2048, 8192, 24576):
                    half = count // 2
                    rows = sorted({*range(40, total - 64, (total - 104) // half)})[:half]
                    rows += range(total - (count - len(rows)), total)
                    case = draw_case(heads, kv_heads, rows, total, LONGEST)
                    for part in parts_of_tokens:
                        parts = LONGEST // part
                        run = lambda: scattered_attention(*case, parts=parts)  # noqa: B023, E731
                        off = float((run().float() - attend_reference(*case)).abs().max()) if part == 512 else None
                        note(case="few", heads=heads, rows=count, total=total, part=part, shape=shape, us=time_calls(run), off=off)
        if time.monotonic() - begun > 120:
            break
        for total, count in ((8192, 896), (24576, 1280)):
            for name in ("uniform", "clustered"):
                tail = list(range(total - 50, total))
                left = count - len(tail)
                rows = ([*range(40, total - 60, (total - 100) // left)][:left] if name == "uniform" else [*range(40, 40 + left)]) + tail
                case = draw_case(heads, kv_heads, rows, total, LONGEST)
                at = case[1]
                first = torch.tensor([rows[max(0, len(rows) - (((len(rows) - 1 - n) // GROUP_ROWS + 1) * GROUP_ROWS))] + 1 for n in range(len(rows))], device="cuda", dtype=torch.int32)
                far = attend_far(case, first)
                for shape in near_shapes:
                    kernels._choose_shape = lambda *_, shape=shape, **__: kernels._Shape(*shape)
                    for parts in (1, 4, 8, 16):
                        run = lambda: scattered_attention(*case, after=far, parts=parts)  # noqa: B023, E731
                        off = float((run().float() - attend_reference(*case)).abs().max()) if parts == 8 and shape == near_shapes[0] else None
                        note(case=f"near {name}", heads=heads, rows=count, total=total, parts=parts, shape=shape, us=time_calls(run), off=off)
                kernels._choose_shape = choose
                run = lambda: scattered_attention(*case)  # noqa: B023, E731
                note(case=f"alone {name}", heads=heads, rows=count, total=total, us=time_calls(run))
        print("seconds", time.monotonic() - begun, flush=True)


main()
