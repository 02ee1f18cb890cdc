"""The kernels of `cdtrans.network.operations`, in Triton.

A program passes over rows, a tile of [ROWS, BLOCK] at a time. What it sums up over them stays in its registers until
the end and becomes one row of sums, so that the result does not depend on which program is faster."""

import math

import triton
import triton.language as tl

# erfc(z) = (a1 t + ... + a5 t^5) exp(-z^2) with t = 1 / (1 + p z), z >= 0 (Abramowitz and Stegun 7.1.26, off by at most
# 3e-7 where bfloat16 rounds at 4e-3): one exponential serves for the normal density and its integral.
P = tl.constexpr(0.3275911 / math.sqrt(2))
A1, A2, A3 = tl.constexpr(0.254829592 / 2), tl.constexpr(-0.284496736 / 2), tl.constexpr(1.421413741 / 2)
A4, A5 = tl.constexpr(-1.453152027 / 2), tl.constexpr(1.061405429 / 2)
DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))


@triton.jit(do_not_specialize=["rows"])
def add_norm_forward(
    x, y, bias, scale, gamma, beta, total, normed, stats, rows, eps,
    TOKENS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CROSS: tl.constexpr,
    ADDS: tl.constexpr, SHIFTS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    valid = (row < rows)[:, None] & (col < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + col[None, :]
    value = tl.load(x + at, valid, 0.0)
    if ADDS:
        added = tl.load(y + at, valid, 0.0).to(tl.float32)
        if SHIFTS:
            added += tl.load(bias + col, col < D, 0.0)[None, :]
        if SCALES:
            added *= tl.load(scale + row // TOKENS, row < rows, 0.0)[:, None]
        value += added
        tl.store(total + at, value, valid)
    mean = tl.sum(value, 1) / D
    centred = tl.where(valid, value - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    tl.store(stats + row, mean, row < rows)
    tl.store(stats + rows + row, rstd, row < rows)
    out = centred * rstd[:, None] * tl.load(gamma + col, col < D, 0.0)[None, :]
    out += tl.load(beta + col, col < D, 0.0)[None, :]
    at, valid = normed_at(row, col, valid, TOKENS, D, CROSS)
    tl.store(normed + at, out, valid)


@triton.jit
def normed_at(row, col, valid, TOKENS: tl.constexpr, D: tl.constexpr, CROSS: tl.constexpr):
    """Where the norm of a row lies, and whether it does: the second of three streams has none."""
    if CROSS:
        image = row // TOKENS
        valid = valid & (image % 3 != 1)[:, None]
        row = (image // 3 * 2 + image % 3 // 2) * TOKENS + row % TOKENS
    return row.to(tl.int64)[:, None] * D + col[None, :], valid


@triton.jit(do_not_specialize=["rows"])
def add_norm_backward(
    d_total, d_normed, total, stats, scale, gamma, d_x, d_y, sums, rows,
    TOKENS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CROSS: tl.constexpr,
    ADDS: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    weight = tl.load(gamma + col, col < D, 0.0)[None, :]
    sum_gamma = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_beta = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & (col < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + col[None, :]
        mean, rstd = tl.load(stats + row, row < rows, 0.0), tl.load(stats + rows + row, row < rows, 0.0)
        unit = tl.where(valid, tl.load(total + at, valid, 0.0) - mean[:, None], 0.0) * rstd[:, None]
        at_normed, normed = normed_at(row, col, valid, TOKENS, D, CROSS)
        gradient = tl.load(d_normed + at_normed, normed, 0.0).to(tl.float32)
        sum_gamma += gradient * unit
        sum_beta += gradient
        gradient *= weight
        along, level = tl.sum(gradient * unit, 1) / D, tl.sum(gradient, 1) / D
        out = (gradient - unit * along[:, None] - level[:, None]) * rstd[:, None] + tl.load(d_total + at, valid, 0.0)
        tl.store(d_x + at, out, valid)
        if ADDS:
            if SCALES:
                out *= tl.load(scale + row // TOKENS, row < rows, 0.0)[:, None]
            tl.store(d_y + at, out, valid)
            sum_bias += tl.where(valid, out, 0.0)
    sums += tl.program_id(0) * 3 * D + col
    tl.store(sums, tl.sum(sum_gamma, 0), col < D)
    tl.store(sums + D, tl.sum(sum_beta, 0), col < D)
    tl.store(sums + 2 * D, tl.sum(sum_bias, 0), col < D)


@triton.jit
def normal(x):
    """The standard normal distribution at x: its integral up to x, and its density."""
    t = tl.rsqrt(tl.abs(x) * P + 1)
    t *= t  # cheaper than a division
    falling = tl.exp(-0.5 * x * x)
    tail = falling * t * (A1 + t * (A2 + t * (A3 + t * (A4 + t * A5))))  # beyond |x|
    return tl.where(x < 0, tail, 1 - tail), falling * DENSITY


@triton.jit(do_not_specialize=["rows"])
def gelu_forward(h, bias, out, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK  # in a row; one grid axis, as the others are short
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    valid = (row < rows)[:, None] & (col < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + col[None, :]
    x = tl.load(h + at, valid, 0.0).to(tl.float32) + tl.load(bias + col, col < COLUMNS, 0.0)[None, :]
    integral, _ = normal(x)
    tl.store(out + at, x * integral, valid)


@triton.jit(do_not_specialize=["rows"])
def gelu_backward(
    d_out, h, bias, d_h, sums, rows,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + col, col < COLUMNS, 0.0)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & (col < COLUMNS)[None, :]
        at = row.to(tl.int64)[:, None] * COLUMNS + col[None, :]
        x = tl.load(h + at, valid, 0.0).to(tl.float32) + shift
        integral, density = normal(x)
        gradient = tl.load(d_out + at, valid, 0.0).to(tl.float32) * (integral + x * density)
        tl.store(d_h + at, gradient, valid)
        total += gradient
    tl.store(sums + tl.program_id(1) * COLUMNS + col, tl.sum(total, 0), col < COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def qkv_backward(
    own, k_own, v_own, both, k_target, v_target, d_qkv, sums, rows,
    TOKENS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CROSS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    sum_q = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_k = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_v = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        image, token = row // TOKENS, row % TOKENS
        valid = (row < rows)[:, None] & (col < D)[None, :]
        is_query = valid & (token < QUERIES)[:, None]
        if CROSS:
            pair, second = image // 2, (image % 2 == 1)[:, None]
            at = (image * QUERIES + token).to(tl.int64)[:, None] * D + col[None, :]
            q = tl.load(both + at, is_query, 0.0).to(tl.float32)
            at = (pair * QUERIES + token).to(tl.int64)[:, None] * D + col[None, :]
            q += tl.load(own + at, is_query & ~second, 0.0).to(tl.float32)
            at = (pair * TOKENS + token).to(tl.int64)[:, None] * D + col[None, :]
            k = tl.load(k_own + at, valid & ~second, 0.0).to(tl.float32)
            k += tl.load(k_target + at, valid & second, 0.0).to(tl.float32)
            v = tl.load(v_own + at, valid & ~second, 0.0).to(tl.float32)
            v += tl.load(v_target + at, valid & second, 0.0).to(tl.float32)
        else:
            at = (image * QUERIES + token).to(tl.int64)[:, None] * D + col[None, :]
            q = tl.load(own + at, is_query, 0.0).to(tl.float32)
            at = row.to(tl.int64)[:, None] * D + col[None, :]
            k = tl.load(k_own + at, valid, 0.0).to(tl.float32)
            v = tl.load(v_own + at, valid, 0.0).to(tl.float32)
        out = d_qkv + row.to(tl.int64)[:, None] * 3 * D + col[None, :]
        tl.store(out, q, valid)
        tl.store(out + D, k, valid)
        tl.store(out + 2 * D, v, valid)
        sum_q += q
        sum_k += k
        sum_v += v
    sums += tl.program_id(0) * 3 * D + col
    tl.store(sums, tl.sum(sum_q, 0), col < D)
    tl.store(sums + D, tl.sum(sum_k, 0), col < D)
    tl.store(sums + 2 * D, tl.sum(sum_v, 0), col < D)


@triton.jit(do_not_specialize=["rows"])
def sum_rows(x, out, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & (col < COLUMNS)[None, :]
        total += tl.load(x + row[:, None] * COLUMNS + col[None, :], valid, 0.0)
    tl.store(out + col, tl.sum(total, 0), col < COLUMNS)
