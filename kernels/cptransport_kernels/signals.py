# SPDX-License-Identifier: Apache-2.0
"""Device-side signals: one rank tells another, through memory both can address, what it may do with data.

Every rank has one *board* of flags at an address its peers know, int64 ``[slots, 2, N]``, N a power
of two >= 32::

    board[slot, PUBLISHED, s]   written by rank s: the generation that s has published to this rank
    board[slot, RELEASED, d]    written by rank d: the generation of this rank it no longer reads

Generations are counted on the device (``counters``, int64 ``[slots]``, private), so a captured
graph that is replayed goes on counting. Flags only grow, so a waiter asks for "at least".

Memory order. A writer stores its flag with *release* at *system* scope: all that the stream did
before (kernel boundaries order it) is visible to whoever reads that flag with *acquire* at system
scope; kernels that come later on the reader's stream see it too. Flags lie in the waiter's memory,
so polling does not cross the link. Data is read in the owner's memory.

Waits have a deadline on ``%globaltimer``. A wait that expires writes ``(1 + peer, slot,
generation)`` to a word that the host can see and goes on; what it was to deliver becomes bytes
0xFF, which are NaN in every floating-point dtype.

One program waits for all peers at once: lane o polls the flag of rank o. Decisions are
reductions over the lanes, so they are uniform over the program, however far its threads drift apart.

GPU only: Triton's interpreter has neither the scopes nor the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cptransport_kernels.launch import launch

__all__ = [
    "PUBLISHED",
    "RELEASED",
    "barrier",
    "board_numel",
    "fetch",
    "lanes",
    "locate",
    "publish",
    "stage",
]

PUBLISHED = 0
RELEASED = 1
_COPY_BLOCK = 2048
_MAX_COPY_PROGRAMS = 64


@triton.jit
def _load_acquire(p_flags):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [p_flags.to(tl.int64)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _store_release(addresses, values, mask):
    """Store where the mask says; the predicate is inside, since every lane runs the instruction."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.sys.global.b64 [$1], $2; mov.b64 $0, $2; }",
        "=l,l,l,r", [addresses, values, mask.to(tl.int32)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _now(o):
    clocks = tl.inline_asm_elementwise(
        "{ mov.u64 $0, %globaltimer; }", "=l,r", [o], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(clocks, axis=0)


@triton.jit
def _in_mask(o, mask):
    return ((mask >> o.to(tl.int64)) & 1) != 0


@triton.jit
def _await(p_flags, o, wanted, value, timeout_ns):
    """Wait until the flags of all wanted lanes are at least value; return the lanes that are not."""
    start = _now(o)
    late = wanted & (_load_acquire(p_flags + o) < value)
    pending = tl.sum(late.to(tl.int32), axis=0)
    expired = 0
    while (pending > 0) & (expired == 0):
        late = wanted & (_load_acquire(p_flags + o) < value)
        pending = tl.sum(late.to(tl.int32), axis=0)
        expired = (_now(o) - start > timeout_ns).to(tl.int32)
    return late


@triton.jit
def _report(p_error, o, late, slot, generation, N: tl.constexpr):
    """Write (1 + lowest late rank, slot, generation) where the host looks; the first word last."""
    peer = tl.min(tl.where(late, o, N), axis=0)
    if peer < N:
        tl.store(p_error + 1, slot.to(tl.int64))
        tl.store(p_error + 2, generation)
        tl.debug_barrier()
        tl.atomic_xchg(p_error, peer.to(tl.int64) + 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["slot", "rank", "releases", "waits", "depth", "timeout_ns"])
def stage_kernel(
    p_counters, p_board, p_boards, p_error, slot, rank, releases, waits, depth, timeout_ns, N: tl.constexpr
):  # fmt: skip
    o = tl.arange(0, N)
    generation = tl.load(p_counters + slot) + 1
    tl.debug_barrier()
    tl.store(p_counters + slot, generation)
    base = slot.to(tl.int64) * 2 * N
    # This rank no longer reads what the sources published in the generation before.
    theirs = tl.load(p_boards + o) + (base + N + rank) * 8
    _store_release(theirs, tl.zeros([N], tl.int64) + (generation - 1), _in_mask(o, releases))
    late = _await(p_board + base + N, o, _in_mask(o, waits), generation - depth, timeout_ns)
    _report(p_error, o, late, slot, generation, N)


@triton.jit(do_not_specialize=["slot", "rank", "targets"])
def publish_kernel(p_counters, p_boards, slot, rank, targets, N: tl.constexpr):
    o = tl.arange(0, N)
    generation = tl.load(p_counters + slot)
    theirs = tl.load(p_boards + o) + (slot.to(tl.int64) * 2 * N + rank) * 8
    _store_release(theirs, tl.zeros([N], tl.int64) + generation, _in_mask(o, targets))


@triton.jit(do_not_specialize=["slot", "rank", "everyone", "timeout_ns"])
def barrier_kernel(
    p_counters, p_board, p_boards, p_error, slot, rank, everyone, timeout_ns, COUNT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    o = tl.arange(0, N)
    generation = tl.load(p_counters + slot)
    if COUNT:
        generation += 1
        tl.debug_barrier()
        tl.store(p_counters + slot, generation)
    base = slot.to(tl.int64) * 2 * N
    theirs = tl.load(p_boards + o) + (base + rank) * 8
    _store_release(theirs, tl.zeros([N], tl.int64) + generation, _in_mask(o, everyone))
    late = _await(p_board + base, o, _in_mask(o, everyone), generation, timeout_ns)
    _report(p_error, o, late, slot, generation, N)


@triton.jit(
    do_not_specialize=[
        "slot", "sources", "timeout_ns", "nan_address", "offset0", "offset1", "offset2", "offset3",
        "present0", "present1", "present2", "present3",
    ]
)  # fmt: skip
def locate_kernel(
    p_counters, p_board, p_regions, p_error, p_table, nan_address,
    slot, sources, timeout_ns, offset0, offset1, offset2, offset3, present0, present1, present2, present3,
    PARTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    o = tl.arange(0, N)
    generation = tl.load(p_counters + slot)
    wanted = _in_mask(o, sources)
    late = _await(p_board + slot.to(tl.int64) * 2 * N, o, wanted, generation, timeout_ns)
    _report(p_error, o, late, slot, generation, N)
    region = tl.load(p_regions + o)
    for part in tl.static_range(PARTS):
        if part == 0:
            offset, present = offset0, present0
        elif part == 1:
            offset, present = offset1, present1
        elif part == 2:
            offset, present = offset2, present2
        else:
            offset, present = offset3, present3
        address = tl.where(late, nan_address, region + offset)
        tl.store(p_table + part * N + o, tl.where(_in_mask(o, present), address, 0))


@triton.jit(
    do_not_specialize=["slot", "source", "offset", "words", "timeout_ns"],
    do_not_specialize_on_alignment=["offset"],
)
def fetch_kernel(
    p_counters, p_board, p_regions, p_error, p_target,
    slot, source, offset, words, timeout_ns, WORD: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    o = tl.arange(0, N)
    generation = tl.load(p_counters + slot)
    late = _await(p_board + slot.to(tl.int64) * 2 * N, o, o == source, generation, timeout_ns)
    missing = tl.sum(late.to(tl.int32), axis=0) > 0
    if tl.program_id(0) == 0:
        _report(p_error, o, late, slot, generation, N)
    address = tl.load(p_regions + source) + offset
    p_source = address.to(tl.pointer_type(WORD))
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, words, step):
        i = first + tl.arange(0, BLOCK)
        inside = i < words
        value = tl.load(p_source + i, mask=inside & (not missing), other=-1, cache_modifier=".cv")
        tl.store(p_target + i, value, mask=inside)


def lanes(world_size: int) -> int:
    """N of a group: a power of two >= 32."""
    return max(32, triton.next_power_of_2(world_size))


def board_numel(slots: int, world_size: int) -> int:
    """Number of int64 flags on a board."""
    return slots * 2 * lanes(world_size)


def stage(
    counters: Tensor, board: Tensor, boards: Tensor, error: Tensor, *,
    slot: int, rank: int, releases: int, waits: int, depth: int, timeout_ns: int,
) -> None:  # fmt: skip
    """Open the next generation: release the one before to its sources, wait until an older one is
    released here.

    Args:
        counters (int64, [slots], cuda): generations, private to this rank.
        board (int64, [slots, 2, N], cuda): this rank's board.
        boards (int64, [N], cuda): addresses of all ranks' boards; unused lanes hold this rank's.
        error (int64, [3], pinned): see the module docstring.
        slot: index of the slot. rank: this rank.
        releases: bit s: tell rank s. waits: bit d: wait for rank d.
        depth: wait for generation ``new - depth``.
        timeout_ns: limit of the wait.

    Stream: runs on the current stream.
    """
    launch(
        stage_kernel, (1,),
        counters, board, boards, error, slot, rank, releases, waits, depth, timeout_ns,
        N=boards.numel(), num_warps=1,
    )  # fmt: skip


def publish(counters: Tensor, boards: Tensor, *, slot: int, rank: int, targets: int) -> None:
    """Tell the targets (bit d: rank d) that this generation may be read. Arguments as ``stage``."""
    launch(
        publish_kernel, (1,), counters, boards, slot, rank, targets, N=boards.numel(), num_warps=1
    )  # fmt: skip


def barrier(
    counters: Tensor, board: Tensor, boards: Tensor, error: Tensor, *,
    slot: int, rank: int, everyone: int, timeout_ns: int, count: bool,
) -> None:  # fmt: skip
    """Tell everyone, and wait for everyone, in the slot's generation.

    Args:
        everyone: bit r for every rank.
        count: begin a new generation first (a slot used for barriers alone).
        others: as ``stage``.
    """
    launch(
        barrier_kernel, (1,),
        counters, board, boards, error, slot, rank, everyone, timeout_ns,
        COUNT=count, N=boards.numel(), num_warps=1,
    )  # fmt: skip


def locate(
    counters: Tensor, board: Tensor, regions: Tensor, error: Tensor, table: Tensor, *,
    slot: int, sources: int, offsets: Sequence[int], present: Sequence[int], nan_address: int, timeout_ns: int,
) -> None:  # fmt: skip
    """Wait for the sources and write where their parts are.

    Args:
        regions (int64, [N], cuda): addresses of all ranks' regions of the slot.
        table (int64, [len(offsets), N], cuda): overwritten; 0 for ranks that are not present,
        ``nan_address`` for late ones.
        sources: bit s: wait for rank s.
        offsets: of at most four parts in a region, bytes.
        present: per part, bit s: rank s has it (this rank's own may be present without being waited
            for).
        nan_address: local memory of NaN as large as any of the parts.
        others: as ``stage``.
    """
    zeros = (0, 0, 0, 0)
    launch(
        locate_kernel, (1,),
        counters, board, regions, error, table, nan_address, slot, sources, timeout_ns,
        *(*offsets, *zeros)[:4], *(*present, *zeros)[:4],
        PARTS=len(offsets), N=regions.numel(), num_warps=1,
    )  # fmt: skip


def fetch(
    counters: Tensor, board: Tensor, regions: Tensor, error: Tensor, target: Tensor, *,
    slot: int, source: int, offset: int, timeout_ns: int,
) -> None:  # fmt: skip
    """Wait for a source and copy bytes out of its region; 0xFF where it is late.

    Args:
        target (uint8, [bytes], cuda): overwritten, contiguous.
        source: rank.
        offset: in its region, bytes.
        others: as ``locate``.
    """
    nbytes = target.numel()
    word: Any = tl.int8
    size = 1
    for bits, dtype in ((8, torch.int64), (4, torch.int32)):
        if nbytes % bits == 0 and offset % bits == 0 and target.data_ptr() % bits == 0:
            target, size = target.view(dtype), bits
            word = tl.int64 if bits == 8 else tl.int32
            break
    else:
        target = target.view(torch.int8)
    words = nbytes // size
    programs = max(1, min(_MAX_COPY_PROGRAMS, triton.cdiv(words, _COPY_BLOCK)))
    launch(
        fetch_kernel, (programs,),
        counters, board, regions, error, target, slot, source, offset, words, timeout_ns,
        WORD=word, BLOCK=_COPY_BLOCK, N=regions.numel(), num_warps=4,
    )  # fmt: skip
