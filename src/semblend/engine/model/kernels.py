"""A layer over a few rows on a CPU, in a few kernels. Importing this module imports numba.

One row reads every weight once: that is memory's work. A library of matrix products packs the weights for the cache in
each call, and from two rows on that costs more than the products. Plain torch, in `model.py` and `attention.py`, is the
twin of all of them. A row's result does not depend on the other rows, nor on the number of threads.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from semblend.fingerprint.kernels import njit

# Sums may be reordered and fused; NaN and infinity keep their meaning, for sampling looks for them.
FAST = {"reassoc", "contract", "nsz", "arcp"}
TASK_OUTPUTS = 96
"""Rows of weights that one task of a product reads."""
SPLIT_KEYS = 64
"""Keys that one task of attention reads: fixed, so that a row is summed in the same order in any company."""


@njit(fastmath=FAST, nogil=True)
def _normalize(x, weight, eps):
    """RMS norm of every row; of no weight, the rows themselves."""
    if weight.size == 0:
        return x
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(x.shape[1]) + eps))
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * weight[i]
    return out


@njit(fastmath=FAST, nogil=True, inline="always")
def _dot(x, weight):
    total = np.float32(0)
    for i in range(len(weight)):
        total += x[i] * weight[i]
    return total


@njit(fastmath=FAST, nogil=True, inline="always")
def _dot_four(x, row, weight, out):
    """Four rows against one row of weights, which is read once."""
    x0, x1, x2, x3 = x[row], x[row + 1], x[row + 2], x[row + 3]
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(len(weight)):
        w = weight[i]
        a += x0[i] * w
        b += x1[i] * w
        c += x2[i] * w
        d += x3[i] * w
    out[row], out[row + 1], out[row + 2], out[row + 3] = a, b, c, d


@njit(fastmath=FAST, nogil=True, inline="always")
def _dot_all(x, weight, out):
    rows = x.shape[0]
    row = 0
    while row + 4 <= rows:
        _dot_four(x, row, weight, out)
        row += 4
    while row < rows:
        out[row] = _dot(x[row], weight)
        row += 1


@njit(parallel=True, fastmath=FAST, nogil=True)
def project(x, norm, eps, weight, bias, out):
    """``out = rms_norm(x) @ weight.T + bias``; an empty ``norm`` or ``bias`` leaves that part away."""
    x = _normalize(x, norm, eps)
    for task in numba.prange(-(-weight.shape[0] // TASK_OUTPUTS)):
        found = np.empty(x.shape[0], np.float32)
        for j in range(task * TASK_OUTPUTS, min(weight.shape[0], (task + 1) * TASK_OUTPUTS)):
            _dot_all(x, weight[j], found)
            plus = bias[j] if bias.size else np.float32(0)
            for row in range(x.shape[0]):
                out[row, j] = found[row] + plus


@njit(parallel=True, fastmath=FAST, nogil=True)
def add_product(x, weight, out):
    """``out += x @ weight.T``."""
    for task in numba.prange(-(-weight.shape[0] // TASK_OUTPUTS)):
        found = np.empty(x.shape[0], np.float32)
        for j in range(task * TASK_OUTPUTS, min(weight.shape[0], (task + 1) * TASK_OUTPUTS)):
            _dot_all(x, weight[j], found)
            for row in range(x.shape[0]):
                out[row, j] += found[row]


@njit(parallel=True, fastmath=FAST, nogil=True)
def gate(x, norm, eps, gate_up, out):
    """``silu(x @ gate.T) * (x @ up.T)`` of the normed rows; ``gate_up`` holds gate's rows, then up's."""
    x = _normalize(x, norm, eps)
    width = gate_up.shape[0] // 2
    for task in numba.prange(-(-width // TASK_OUTPUTS)):
        opens = np.empty(x.shape[0], np.float32)
        found = np.empty(x.shape[0], np.float32)
        for j in range(task * TASK_OUTPUTS, min(width, (task + 1) * TASK_OUTPUTS)):
            _dot_all(x, gate_up[j], opens)
            _dot_all(x, gate_up[width + j], found)
            for row in range(x.shape[0]):
                out[row, j] = found[row] * opens[row] / (np.float32(1) + math.exp(-opens[row]))


@njit(fastmath=FAST, nogil=True)
def turn(qkv, heads, kv_heads, cos, sin, q_norm, k_norm, eps):
    """Norm (where there is one) and rotate the heads of q and k, in place."""
    dim = cos.shape[1]
    half = dim // 2
    turned = np.empty(dim, np.float32)
    for row in range(qkv.shape[0]):
        for head in range(heads + kv_heads):
            x = qkv[row, head * dim : (head + 1) * dim]
            norm = q_norm if head < heads else k_norm
            if norm.size:
                x[:] = _normalize(x.reshape(1, dim), norm, eps)[0]
            for i in range(half):
                turned[i] = x[i] * cos[row, i] + x[i + half] * sin[row, i]
                turned[i + half] = x[i + half] * cos[row, i + half] + x[i] * sin[row, i + half]
            x[:] = turned


@njit(nogil=True)
def write(qkv, heads, k_pool, v_pool, slots):
    """Put the rows' keys and values into their slots of one layer."""
    kv_heads, dim = k_pool.shape[1], k_pool.shape[2]
    for row in range(qkv.shape[0]):
        for head in range(kv_heads):
            k, v = (heads + head) * dim, (heads + kv_heads + head) * dim
            k_pool[slots[row], head] = qkv[row, k : k + dim]
            v_pool[slots[row], head] = qkv[row, v : v + dim]


@njit(parallel=True, fastmath=FAST, nogil=True)
def attend(qkv, heads, k_pool, v_pool, contexts, lengths, tasks, out):
    """Attention of each row over its context: slots ``contexts[row_start : row_start + length]`` of one layer.

    ``lengths[row] = (row_start, length)``. A task is a stretch of at most `SPLIT_KEYS` keys of one row, over all heads;
    ``tasks[task] = (row, first key)``, a row's tasks one after another. Their results are joined row by row.
    """
    kv_heads, dim = k_pool.shape[1], k_pool.shape[2]
    group = heads // kv_heads
    best = np.empty((len(tasks), heads), np.float32)
    total = np.empty((len(tasks), heads), np.float32)
    sums = np.empty((len(tasks), heads, dim), np.float32)
    for at in numba.prange(len(tasks) * kv_heads):
        task, kv_head = at // kv_heads, at % kv_heads
        row, first = tasks[task]
        start, length = lengths[row]
        slots = contexts[start + first : start + min(length, first + SPLIT_KEYS)]
        head = kv_head * group
        q = qkv[row, head * dim : (head + group) * dim].reshape(group, dim)
        _attend_some(
            q,
            k_pool,
            v_pool,
            kv_head,
            slots,
            best[task, head : head + group],
            total[task, head : head + group],
            sums[task, head : head + group],
        )
    _join_tasks(tasks, best, total, sums, out)


@njit(fastmath=FAST, nogil=True, inline="always")
def _dot_keys(q, k0, k1, k2, k3, scale, out):
    """One query against four keys, its numbers read once."""
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(len(q)):
        x = q[i]
        a += x * k0[i]
        b += x * k1[i]
        c += x * k2[i]
        d += x * k3[i]
    out[0], out[1], out[2], out[3] = a * scale, b * scale, c * scale, d * scale


@njit(fastmath=FAST, nogil=True)
def _attend_some(q, k, v, kv_head, slots, best, total, sums):
    """Largest score, sum of weights and weighted sum of values of some keys, for the queries of one KV head."""
    group, dim = q.shape
    weights = np.empty((group, len(slots)), np.float32)
    scale = np.float32(1 / math.sqrt(dim))
    t = 0
    while t + 4 <= len(slots):
        a, b = k[slots[t], kv_head], k[slots[t + 1], kv_head]
        c, d = k[slots[t + 2], kv_head], k[slots[t + 3], kv_head]
        for g in range(group):
            _dot_keys(q[g], a, b, c, d, scale, weights[g, t : t + 4])
        t += 4
    while t < len(slots):
        for g in range(group):
            weights[g, t] = _dot(q[g], k[slots[t], kv_head]) * scale
        t += 1
    for g in range(group):
        best[g] = weights[g].max()
        for t in range(len(slots)):
            weights[g, t] = math.exp(weights[g, t] - best[g])
        total[g] = weights[g].sum()
    sums[:] = 0
    t = 0
    while t + 4 <= len(slots):  # four values at once: a sum is loaded and stored a quarter as often
        a, b = v[slots[t], kv_head], v[slots[t + 1], kv_head]
        c, d = v[slots[t + 2], kv_head], v[slots[t + 3], kv_head]
        for g in range(group):
            wa, wb, wc, wd = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
            for i in range(dim):
                sums[g, i] += wa * a[i] + wb * b[i] + wc * c[i] + wd * d[i]
        t += 4
    while t < len(slots):
        value = v[slots[t], kv_head]
        for g in range(group):
            for i in range(dim):
                sums[g, i] += weights[g, t] * value[i]
        t += 1


@njit(fastmath=FAST, nogil=True)
def _join_tasks(tasks, best, total, sums, out):
    heads, dim = sums.shape[1], sums.shape[2]
    task = 0
    while task < len(tasks):
        end = task + 1
        while end < len(tasks) and tasks[end, 0] == tasks[task, 0]:
            end += 1
        row = tasks[task, 0]
        for head in range(heads):
            most = best[task:end, head].max()
            whole = np.float32(0)
            found = out[row, head * dim : (head + 1) * dim]
            found[:] = 0
            for one in range(task, end):
                share = np.float32(math.exp(best[one, head] - most))
                whole += total[one, head] * share
                for i in range(dim):
                    found[i] += sums[one, head, i] * share
            for i in range(dim):
                found[i] /= whole
        task = end
