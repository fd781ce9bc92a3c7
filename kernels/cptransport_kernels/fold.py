# SPDX-License-Identifier: Apache-2.0
"""The fold of affine summaries: one kernel for every transport and for the pieces of a cut segment.

A destination row is the result of a list of *steps* over a start state X:

    X <- E                      a step without transition: the state is known
    X <- M X + E                forward        X <- M^T X + dE         backward (``transposed``)

Steps are int32 ``[R, S, 4]`` = (source, state row, transition row, prefix row), each row -1 for
"none"; ``rows`` int32 ``[R, 2]`` = (number of steps, row of the result in ``out`` or -1: not
wanted). A source is an index into int64 tables of addresses, one per part: what a rank staged, in
its own or in a peer's memory. Without tables the two parts are local tensors. Rows are per batch
row: ``row * B + b``.

States and transitions are K-major, or V-major (``v_major``): then a state is stored ``[V, K]`` and M
transposed. The arithmetic is the same; only where elements lie differs.

Arithmetic is float32, products IEEE or three-pass tf32 (within 2e-6 of IEEE): results do not
depend on where a summary lies. Parts of peers are read past the L1 cache, which is not coherent
with other devices; so each read of 4 bytes would cross the link as a request for 32, and 16 are read
at once where addresses are known to allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cptransport_kernels.dependent import after_those_before, launched_early, let_next_start
from cptransport_kernels.launch import launch, on_gpu, processors

__all__ = ["FoldSteps", "fold", "part_at"]


@triton.jit
def part_at(p_table, source, ALIGNED: tl.constexpr):
    """A source's float32 part; ALIGNED: addresses are multiples of 16."""
    p = tl.load(p_table + source).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(p, 16) if ALIGNED else p


@triton.jit
def _copy(p_dst, p_src, o_c, K: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, BR: tl.constexpr):
    for r in range(0, K, BR):
        o = (r + tl.arange(0, BR))[:, None] * SK + o_c[None, :] * SV
        tl.store(p_dst + o, tl.load(p_src + o, cache_modifier=".cg"))


@triton.jit
def _place(row, i_b, i_h, B, HV, K: tl.constexpr, V: tl.constexpr):
    """Offset of the block of a row's head."""
    return ((row * B + i_b).to(tl.int64) * HV + i_h) * K * V


@triton.jit
def _task(p_rows, B, V: tl.constexpr, BC: tl.constexpr):
    """What a program folds: columns, row, batch row and head; how many steps; the row of the result."""
    NC: tl.constexpr = V // BC
    o_c = tl.program_id(0) % NC * BC + tl.arange(0, BC)
    i_r = tl.program_id(0) // NC // B
    i_b = tl.program_id(0) // NC % B
    return o_c, i_r, i_b, tl.program_id(1), tl.load(p_rows + i_r * 2), tl.load(p_rows + i_r * 2 + 1)


@triton.jit
def _look_up(
    p_state,
    p_transition,
    p_step,
    i_b,
    i_h,
    B,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    ADDRESSES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A step: its state row, its transition row, and where a head's E and M are."""
    source = tl.load(p_step)
    state_row = tl.load(p_step + 1)
    transition_row = tl.load(p_step + 2)
    o_e = _place(tl.maximum(state_row, 0), i_b, i_h, B, HV, K, V)
    o_m = _place(tl.maximum(transition_row, 0), i_b, i_h, B, HV, K, K)
    if ADDRESSES:
        p_e = part_at(p_state, source, ALIGNED) + o_e
        p_m = part_at(p_transition, source, ALIGNED) + o_m
    else:
        p_e = p_state + o_e
        p_m = p_transition + o_m
    return state_row, transition_row, p_e, p_m


@triton.jit(do_not_specialize=["B", "HV", "S"])
def fold_kernel(
    p_state,
    p_transition,
    p_start,
    p_out,
    p_prefix,
    p_steps,
    p_rows,
    B,
    HV,
    S,
    K: tl.constexpr,
    V: tl.constexpr,
    BC: tl.constexpr,
    ADDRESSES: tl.constexpr,
    ALIGNED: tl.constexpr,
    V_MAJOR: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PREC: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Fold BC columns of one destination row's head; X stays in registers, and M passes through them."""
    SK: tl.constexpr = 1 if V_MAJOR else V
    SV: tl.constexpr = K if V_MAJOR else 1
    after_those_before(EARLY)
    let_next_start(EARLY)
    o_c, i_r, i_b, i_h, n, result = _task(p_rows, B, V, BC)
    o_k = tl.arange(0, K)
    o_x = o_k[:, None] * SK + o_c[None, :] * SV
    if TRANSPOSED != V_MAJOR:  # noqa: SIM108  # a V-major table holds the transpose
        o_m = o_k[None, :] * K + o_k[:, None]
    else:
        o_m = o_k[:, None] * K + o_k[None, :]
    if p_start is not None:
        b_x = tl.load(p_start + _place(i_r, i_b, i_h, B, HV, K, V) + o_x)
    else:
        b_x = tl.zeros([K, BC], tl.float32)
    p_step = p_steps + i_r * S * 4
    state_row, transition_row, p_e, p_m = _look_up(
        p_state, p_transition, p_step, i_b, i_h, B, HV, K, V, ADDRESSES, ALIGNED
    )
    for s in range(n):
        # Two look-ups in memory lead to the next summary: they pass while this one is read.
        p_next = p_step + tl.minimum(s + 1, n - 1) * 4
        later_state, later_transition, p_later_e, p_later_m = _look_up(
            p_state, p_transition, p_next, i_b, i_h, B, HV, K, V, ADDRESSES, ALIGNED
        )
        if p_prefix is not None:
            row = tl.load(p_step + s * 4 + 3)
            if row >= 0:
                tl.store(p_prefix + _place(row, i_b, i_h, B, HV, K, V) + o_x, b_x)
        b_e = tl.load(
            p_e + o_x,
            mask=(o_c[None, :] >= 0) & (state_row >= 0),
            other=0.0,
            cache_modifier=".cg",
        )
        if transition_row < 0:
            b_x = b_e
        else:
            b_m = tl.load(p_m + o_m, cache_modifier=".cg")
            b_x = tl.dot(b_m, b_x, b_e, input_precision=PREC)
        state_row, transition_row, p_e, p_m = (
            later_state,
            later_transition,
            p_later_e,
            p_later_m,
        )
    if result >= 0:
        tl.store(p_out + _place(result, i_b, i_h, B, HV, K, V) + o_x, b_x)


@triton.jit(do_not_specialize=["B", "R", "HV", "S"])
def fold_wide_kernel(
    p_state,
    p_transition,
    p_start,
    p_out,
    p_prefix,
    p_scratch,
    p_steps,
    p_rows,
    B,
    R,
    HV,
    S,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    ADDRESSES: tl.constexpr,
    ALIGNED: tl.constexpr,
    V_MAJOR: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PREC: tl.constexpr,
):
    """The same where M is too large for registers: blocks of BR rows, and X in one of two scratches."""
    SK: tl.constexpr = 1 if V_MAJOR else V
    SV: tl.constexpr = K if V_MAJOR else 1
    o_c, i_r, i_b, i_h, n, result = _task(p_rows, B, V, BC)
    p_a = p_scratch + _place(i_r, i_b, i_h, B, HV, K, V)
    p_b = p_scratch + _place(R + i_r, i_b, i_h, B, HV, K, V)
    p_x = p_a
    if p_start is not None:
        p_x = p_start + _place(i_r, i_b, i_h, B, HV, K, V)
    else:
        for r in range(0, K, BR):
            o = (r + tl.arange(0, BR))[:, None] * SK + o_c[None, :] * SV
            tl.store(p_a + o, tl.zeros([BR, BC], tl.float32))
        tl.debug_barrier()

    for s in range(n):
        p_step = p_steps + (i_r * S + s) * 4
        state_row, transition_row, p_e, p_m = _look_up(
            p_state, p_transition, p_step, i_b, i_h, B, HV, K, V, ADDRESSES, ALIGNED
        )
        if p_prefix is not None:
            row = tl.load(p_step + 3)
            if row >= 0:
                p_kept = p_prefix + _place(row, i_b, i_h, B, HV, K, V)
                _copy(p_kept, p_x, o_c, K, SK, SV, BR)
        if transition_row < 0:
            p_x = p_e
        else:
            p_dst = p_a if s % 2 == 1 else p_b
            for r in range(0, K, BR):
                o_r = r + tl.arange(0, BR)
                o_e = o_r[:, None] * SK + o_c[None, :] * SV
                b_x = tl.load(
                    p_e + o_e,
                    mask=(o_c[None, :] >= 0) & (state_row >= 0),
                    other=0.0,
                    cache_modifier=".cg",
                )
                for c in range(0, K, BR):
                    o_i = c + tl.arange(0, BR)
                    if TRANSPOSED != V_MAJOR:  # noqa: SIM108  # as above
                        o_m = o_i[None, :] * K + o_r[:, None]
                    else:
                        o_m = o_r[:, None] * K + o_i[None, :]
                    b_m = tl.load(p_m + o_m, cache_modifier=".cg")
                    o_x = o_i[:, None] * SK + o_c[None, :] * SV
                    b_i = tl.load(p_x + o_x, cache_modifier=".cg")
                    b_x = tl.dot(b_m, b_i, b_x, input_precision=PREC)
                tl.store(p_dst + o_e, b_x)
            p_x = p_dst
            # The next step reads what other threads of this program wrote.
            tl.debug_barrier()
    if result >= 0:
        _copy(p_out + _place(result, i_b, i_h, B, HV, K, V), p_x, o_c, K, SK, SV, BR)


# Columns of one program, and microseconds that a wave of such programs takes: measured on an H200 at
# K = V = 128, three sources, one program per multiprocessor (its registers allow no second). All give
# the same bits. Rows of a block of M that one program holds; warps.
_COLUMNS = ((16, 9.0), (32, 11.5), (64, 15.0))
_ROWS, _WARPS = 128, 8


class FoldSteps:
    """The steps of a fold, uploaded once.

    Args:
        rows: per destination its steps, each (source, state row, transition row, prefix row); -1
            for none.
        device: where the fold runs.
        results: per destination the row of its result in ``out``; -1: not wanted. None: its own
            position.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[tuple[int, int, int, int]]],
        device: torch.device | str,
        results: Sequence[int] | None = None,
    ) -> None:
        self.num_rows = len(rows)
        self.max_steps = max((len(row) for row in rows), default=0) or 1
        padded = [[*row, *[(0, -1, -1, -1)] * (self.max_steps - len(row))] for row in rows]
        heads = [(len(row), i if results is None else results[i]) for i, row in enumerate(rows)]
        self.steps = (
            torch.tensor(padded, dtype=torch.int32).reshape(-1, self.max_steps, 4).to(device)
        )
        self.rows = torch.tensor(heads, dtype=torch.int32).reshape(-1, 2).to(device)


def fold(
    steps: FoldSteps,
    state: Tensor,
    transition: Tensor | None,
    *,
    shape: tuple[int, int, int],
    batch: int = 1,
    start: Tensor | None = None,
    prefix: Tensor | None = None,
    out: Tensor | None = None,
    v_major: bool = False,
    transposed: bool = False,
    precision: str = "tf32x3",
    aligned: bool = False,
    linked: bool = False,
) -> Tensor:
    """Fold summaries into the states they lead to.

    Args:
        steps: what is folded, in order, per destination row.
        state: int64 ``[world_size]``, addresses of the parts that hold E (or dE), or float32
            ``[rows * B, HV, K, V]`` itself.
        transition: the same for M, ``[rows * B, HV, K, K]``; None when no step has a transition.
        shape: (HV, K, V).
        batch: B.
        start: float32 ``[R * B, HV, K, V]``; None means zero.
        prefix: float32 ``[rows * B, HV, K, V]`` or None; a step's prefix row receives the state
            before that step.
        out: float32 ``[R * B, HV, K, V]``, overwritten; must not alias a summary. None: allocated.
        v_major: all states are stored ``[..., V, K]``, and all transitions transposed.
        transposed: apply M^T.
        precision: ``"tf32x3"`` or ``"ieee"``.
        aligned: all addresses are multiples of 16.
        linked: some lead to another device's memory.

    Returns:
        ``out``.

    Raises:
        ValueError: a precision that is neither.

    Collective: no.
    Stream: runs on the current stream; ``out`` is valid after it.
    Source: docs/algebra.md, "Composition and the scan".
    """
    if precision not in ("tf32x3", "ieee"):
        raise ValueError(f"precision is 'tf32x3' or 'ieee', not {precision!r}")
    heads, key_dim, value_dim = shape
    rows = steps.num_rows
    stored = (heads, value_dim, key_dim) if v_major else shape
    if out is None:
        out = torch.empty(rows * batch, *stored, dtype=torch.float32, device=steps.steps.device)
    if rows == 0:
        return out
    tables: dict[str, Any] = {
        "K": key_dim,
        "V": value_dim,
        "BC": _columns(value_dim, rows * batch * heads, processors(out.device), linked),
        "ADDRESSES": state.dtype == torch.int64,
        "ALIGNED": aligned,
        "V_MAJOR": v_major,
        "TRANSPOSED": transposed,
        "PREC": precision if on_gpu(out) else "ieee",
        "num_warps": _WARPS,
        "num_stages": 1,
    }
    grid = (value_dim // tables["BC"] * rows * batch, heads)
    ends = (state, state if transition is None else transition, start, out, prefix)
    sizes = (steps.steps, steps.rows, batch)
    if key_dim <= _ROWS:
        tables |= launched_early(out.device)
        launch(fold_kernel, grid, *ends, *sizes, heads, steps.max_steps, **tables)
        return out
    scratch = torch.empty(2, rows * batch, *stored, dtype=torch.float32, device=out.device)
    launch(
        fold_wide_kernel,
        grid,
        *ends,
        scratch,
        *sizes,
        rows,
        heads,
        steps.max_steps,
        BR=_ROWS,
        **tables,
    )
    return out


def _columns(value_dim: int, blocks: int, num_processors: int, linked: bool) -> int:
    """Return the columns of one program; ``blocks`` heads of rows are folded."""

    def cost(choice: tuple[int, float]) -> float:
        columns, wave_us = choice
        return -(-value_dim // columns * blocks // num_processors) * wave_us

    fitting = [choice for choice in _COLUMNS if choice[0] <= value_dim]
    # Every program reads all of M, and a link is slower than what a wave costs.
    return fitting[-1][0] if linked else min(fitting, key=cost)[0]
