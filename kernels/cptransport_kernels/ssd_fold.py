# SPDX-License-Identifier: Apache-2.0
"""The fold of SSD's summaries, whose transitions are numbers: ``fold``, element by element.

One pass over the sources whatever their number, where torch takes two kernels for each. It serves
any op whose destinations have one known state each: that is copied as it lies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cptransport_kernels.dependent import after_those_before, launched_early, let_next_start
from cptransport_kernels.fold import FoldSteps, part_at
from cptransport_kernels.launch import launch

__all__ = ["ssd_fold"]

#: Elements of a state that one program folds.
_ELEMENTS = 1024


@triton.jit(do_not_specialize=["B", "H", "S"])
def ssd_fold_kernel(
    p_state,
    p_transition,
    p_out,
    p_steps,
    p_rows,
    B,
    H,
    S,
    E: tl.constexpr,
    BE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Fold one destination row's sources; one program per row, head and BE of its E elements.

    Args:
        p_state, p_transition: int64, addresses of the sources' float32 parts, ``[rows * B, H, E]`` and
            ``[rows * B, H]``.
        p_out: float32 ``[rows * B, H, E]``.
        p_steps, p_rows: of ``FoldSteps``.
        S: steps of a row in ``p_steps``.
    """
    NE: tl.constexpr = (E + BE - 1) // BE
    i_e = tl.program_id(0) % NE
    i_r = tl.program_id(0) // NE // B
    i_b = tl.program_id(0) // NE % B
    i_h = tl.program_id(1)
    o_e = i_e * BE + tl.arange(0, BE)
    m_e = o_e < E
    after_those_before(EARLY)
    let_next_start(EARLY)
    b_s = tl.zeros([BE], tl.float32)
    for s in range(tl.load(p_rows + i_r * 2)):
        step = p_steps + (i_r * S + s) * 4
        source = tl.load(step)
        head = (tl.load(step + 1) * B + i_b).to(tl.int64) * H + i_h
        # Past the L1 cache, as there.
        p_e = part_at(p_state, source, ALIGNED) + head * E
        b_e = tl.load(p_e + o_e, mask=m_e, other=0.0, cache_modifier=".cg")
        if tl.load(step + 2) >= 0:
            p_m = part_at(p_transition, source, False)
            b_e += tl.exp(tl.load(p_m + head, cache_modifier=".cg")) * b_s
        b_s = b_e
    result = tl.load(p_rows + i_r * 2 + 1)
    p_s = p_out + ((result * B + i_b).to(tl.int64) * H + i_h) * E
    tl.store(p_s + o_e, b_s, mask=m_e)


def ssd_fold(
    steps: FoldSteps,
    state: Tensor,
    transition: Tensor | None,
    *,
    batch: int,
    out: Tensor,
    aligned: bool = False,
) -> None:
    """Fold summaries into the states they lead to.

    Args:
        steps: what is folded, in order, per destination row; each has a result, a step a transition
            of the state's row or none.
        state: int64 ``[world_size]``, addresses of the parts that hold E (or dE), ``[rows * B, H, P,
            N]``.
        transition: the same of log decays, ``[rows * B, H]``; None when no step has one.
        batch: B.
        out: float32 ``[R * B, H, P, N]``; results' rows are overwritten; must not alias a summary.
        aligned: addresses of states are multiples of 16.

    Collective: no.
    Stream: runs on the current stream; ``out`` is valid after it.
    Source: docs/algebra.md, "Composition and the scan".
    """
    _, heads, headdim, dstate = out.shape
    elements = headdim * dstate
    launch(
        ssd_fold_kernel,
        (-(-elements // _ELEMENTS) * steps.num_rows * batch, heads),
        state,
        state if transition is None else transition,
        out,
        steps.steps,
        steps.rows,
        batch,
        heads,
        steps.max_steps,
        E=elements,
        BE=_ELEMENTS,
        ALIGNED=aligned,
        num_warps=4,
        num_stages=1,
        **launched_early(out.device),
    )
