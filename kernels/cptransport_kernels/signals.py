# SPDX-License-Identifier: Apache-2.0
"""Device-side signals: one rank tells another, through memory both can address, what it may do with data.

Every rank has one *board* of flags at an address its peers know, int64 ``[slots, 2, N]``, N a power
of two >= 32::

    board[slot, PUBLISHED, s]   written by rank s: what s has published to this rank, as
                                generation << STEP_BITS | step
    board[slot, RELEASED, d]    written by rank d: the generation of this rank it no longer reads

Generations are counted on the device (``counters``, int64 ``[slots]``, private), so a captured
graph that is replayed goes on counting. Flags only grow, so a waiter asks for "at least". The *step*
is the publisher's op call that staged the generation; a taker that finds another step than its own
there knows that some rank left an op call out. Slots count from 1: ``counters[0]`` says that a wait
of this rank has expired.

Memory order. A writer stores its flag with *release* at *system* scope: all that the stream did
before (kernel boundaries order it) is visible to whoever reads that flag with *acquire* at system
scope; kernels that come later on the reader's stream see it too. Flags lie in the waiter's memory,
so polling does not cross the link. Data is read in the owner's memory.

Waits have a deadline on ``%globaltimer``. The first that expires writes ``(1 + peer, slot,
generation)`` to a word that the host can see (``-(1 + peer)``: the peer was in another step) and
goes on; what it was to deliver becomes bytes 0xFF, which are NaN in every floating-point dtype.
Waits after it only look, so that a queue of them ends at once. The host ends a wait early by a
non-zero fourth word; the fifth says that a wait takes long.

One program waits for all peers at once: lane o polls the flag of rank o. A program is one warp and
its decisions are reductions over the lanes, so all its threads decide alike: several warps would each
poll for themselves, and might differ at the deadline.

GPU only: Triton's interpreter has neither the scopes nor the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cptransport_kernels.dependent import after_those_before, launched_early, let_next_start
from cptransport_kernels.launch import launch

__all__ = [
    "PUBLISHED",
    "RELEASED",
    "STEP_BITS",
    "TABLE_PARTS",
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
STEP_BITS = 20
#: Parts that one ``locate`` writes the addresses of.
TABLE_PARTS = 4

_STEP_BITS = tl.constexpr(STEP_BITS)
_STEP_MASK = tl.constexpr((1 << STEP_BITS) - 1)
#: How many looks at the flags come to one at the host's word.
_LOOKS_AT_HOST = tl.constexpr(512)
_COPY_BLOCK = 1024
_MAX_COPY_PROGRAMS = 256


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
def _await(p_flags, p_error, o, wanted, value, shift, failed, timeout_ns):
    """Wait until the flags of all wanted lanes, shifted, are at least value.

    Returns the lanes whose flags are not, and all flags. After a failure: look, do not wait.
    """
    start = _now(o)
    flags = _load_acquire(p_flags + o)
    late = wanted & ((flags >> shift) < value)
    pending = tl.sum(late.to(tl.int32), axis=0)
    expired = failed
    looks = 0
    while (pending > 0) & (expired == 0):
        flags = _load_acquire(p_flags + o)
        late = wanted & ((flags >> shift) < value)
        pending = tl.sum(late.to(tl.int32), axis=0)
        expired = (_now(o) - start > timeout_ns).to(tl.int64)
        looks += 1
        if looks % _LOOKS_AT_HOST == 0:  # host memory is far away
            expired += tl.load(p_error + 3, volatile=True)
            tl.store(p_error + 4, 1)
    return late, flags


@triton.jit
def _await_publication(
    p_board, p_error, o, wanted, slot, generation, step, failed, timeout_ns, N: tl.constexpr
):
    """Wait for the wanted ranks' publication; return who is late, and who published in another step."""
    late, flags = _await(
        p_board + slot * 2 * N, p_error, o, wanted, generation, _STEP_BITS, failed, timeout_ns
    )
    same = (flags >> _STEP_BITS) == generation
    strayed = wanted & same & ((flags & _STEP_MASK) != step)
    return late, strayed


@triton.jit
def _report(p_error, p_counters, o, late, strayed, slot, generation, failed, N: tl.constexpr):
    """Write the lowest rank that is late, else has strayed, where the host looks; its word last."""
    peer = tl.min(tl.where(late, o, N), axis=0)
    code = peer + 1
    if peer == N:
        peer = tl.min(tl.where(strayed, o, N), axis=0)
        code = -(peer + 1)
    if (peer < N) & (failed == 0):
        tl.store(p_counters, 1)
        tl.store(p_error + 1, slot)
        tl.store(p_error + 2, generation)
        tl.debug_barrier()
        zeros = tl.zeros([N], tl.int64)
        # Not an atomic: those need not reach host memory.
        _store_release(p_error.to(tl.int64) + zeros, code.to(tl.int64) + zeros, o == 0)


@triton.jit(do_not_specialize=["slot", "rank", "releases", "waits", "depth", "timeout_ns"])
def stage_kernel(
    p_counters, p_board, p_boards, p_error, slot: tl.int64, rank: tl.int64, releases: tl.int64,
    waits: tl.int64, depth: tl.int64, timeout_ns: tl.int64, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_those_before(EARLY)
    let_next_start(EARLY)
    o = tl.arange(0, N)
    failed = tl.load(p_counters)
    generation = tl.load(p_counters + slot) + 1
    tl.debug_barrier()
    tl.store(p_counters + slot, generation)
    base = slot * 2 * N + N
    # This rank no longer reads what the sources published in the generation before.
    theirs = tl.load(p_boards + o) + (base + rank) * 8
    _store_release(theirs, tl.zeros([N], tl.int64) + (generation - 1), _in_mask(o, releases))
    late, flags = _await(
        p_board + base, p_error, o, _in_mask(o, waits), generation - depth, 0, failed, timeout_ns
    )
    _report(p_error, p_counters, o, late, o < 0, slot, generation, failed, N)


@triton.jit(do_not_specialize=["slot", "rank", "targets", "step"])
def publish_kernel(
    p_counters, p_boards, slot: tl.int64, rank: tl.int64, targets: tl.int64, step: tl.int64, N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_those_before(EARLY)
    let_next_start(EARLY)
    o = tl.arange(0, N)
    stamp = (tl.load(p_counters + slot) << _STEP_BITS) + step
    theirs = tl.load(p_boards + o) + (slot * 2 * N + rank) * 8
    _store_release(theirs, tl.zeros([N], tl.int64) + stamp, _in_mask(o, targets))


@triton.jit(do_not_specialize=["slot", "rank", "everyone", "step", "timeout_ns"])
def barrier_kernel(
    p_counters, p_board, p_boards, p_error, slot: tl.int64, rank: tl.int64, everyone: tl.int64,
    step: tl.int64, timeout_ns: tl.int64, COUNT: tl.constexpr, N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_those_before(EARLY)
    let_next_start(EARLY)
    o = tl.arange(0, N)
    failed = tl.load(p_counters)
    generation = tl.load(p_counters + slot)
    if COUNT:
        generation += 1
        tl.debug_barrier()
        tl.store(p_counters + slot, generation)
    theirs = tl.load(p_boards + o) + (slot * 2 * N + rank) * 8
    stamp = (generation << _STEP_BITS) + step
    _store_release(theirs, tl.zeros([N], tl.int64) + stamp, _in_mask(o, everyone))
    late, strayed = _await_publication(
        p_board, p_error, o, _in_mask(o, everyone), slot, generation, step, failed, timeout_ns, N
    )
    _report(p_error, p_counters, o, late, strayed, slot, generation, failed, N)


@triton.jit(
    do_not_specialize=[
        "nan_address", "slot", "sources", "step", "timeout_ns", "offset0", "offset1", "offset2", "offset3",
        "present0", "present1", "present2", "present3",
    ],
    do_not_specialize_on_alignment=["p_table"],
)  # fmt: skip
def locate_kernel(
    p_counters, p_board, p_regions, p_error, p_table, nan_address: tl.int64, slot: tl.int64,
    sources: tl.int64, step: tl.int64, timeout_ns: tl.int64,
    offset0: tl.int64, offset1: tl.int64, offset2: tl.int64, offset3: tl.int64,
    present0: tl.int64, present1: tl.int64, present2: tl.int64, present3: tl.int64,
    PARTS: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_those_before(EARLY)
    o = tl.arange(0, N)
    failed = tl.load(p_counters)
    generation = tl.load(p_counters + slot)
    late, strayed = _await_publication(
        p_board, p_error, o, _in_mask(o, sources), slot, generation, step, failed, timeout_ns, N
    )
    let_next_start(EARLY)  # not before: it may want the whole device, and this may wait for long
    _report(p_error, p_counters, o, late, strayed, slot, generation, failed, N)
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
        address = tl.where(late | strayed, nan_address, region + offset)
        tl.store(p_table + part * N + o, tl.where(_in_mask(o, present), address, 0))


@triton.jit(
    do_not_specialize=["slot", "source", "offset", "words", "step", "timeout_ns"],
    do_not_specialize_on_alignment=["p_target"],
)
def fetch_kernel(
    p_counters, p_board, p_regions, p_error, p_target, slot: tl.int64, source: tl.int64,
    offset: tl.int64, words: tl.int64, step: tl.int64, timeout_ns: tl.int64,
    WORD: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    o = tl.arange(0, N)
    failed = tl.load(p_counters)
    generation = tl.load(p_counters + slot)
    late, strayed = _await_publication(
        p_board, p_error, o, o == source, slot, generation, step, failed, timeout_ns, N
    )
    missing = tl.sum((late | strayed).to(tl.int32), axis=0) > 0
    if tl.program_id(0) == 0:
        _report(p_error, p_counters, o, late, strayed, slot, generation, failed, N)
    tl.debug_barrier()  # what one lane has acquired, all threads may read
    address = tl.load(p_regions + source) + offset
    p_source = address.to(tl.pointer_type(WORD))
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, words, stride):
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
        counters (int64, [slots], cuda): generations, private to this rank; see the module docstring.
        board (int64, [slots, 2, N], cuda): this rank's board.
        boards (int64, [N], cuda): addresses of all ranks' boards; unused lanes hold this rank's.
        error (int64, [5], pinned): see the module docstring.
        slot: index of the slot, from 1. rank: this rank.
        releases: bit s: tell rank s. waits: bit d: wait for rank d.
        depth: wait for generation ``new - depth``.
        timeout_ns: limit of the wait.

    Stream: runs on the current stream.
    """
    launch(
        stage_kernel, (1,),
        counters, board, boards, error, slot, rank, _bits(releases), _bits(waits), depth, timeout_ns,
        N=boards.numel(), num_warps=1, **launched_early(boards.device),
    )  # fmt: skip


def publish(
    counters: Tensor, boards: Tensor, *, slot: int, rank: int, targets: int, step: int
) -> None:
    """Tell the targets (bit d: rank d) that this generation may be read.

    Args:
        step: of the op call that staged it, modulo ``2 ** STEP_BITS``.
        others: as ``stage``.
    """
    launch(
        publish_kernel, (1,), counters, boards, slot, rank, _bits(targets), step,
        N=boards.numel(), num_warps=1, **launched_early(boards.device),
    )  # fmt: skip


def barrier(
    counters: Tensor, board: Tensor, boards: Tensor, error: Tensor, *,
    slot: int, rank: int, everyone: int, step: int, timeout_ns: int, count: bool,
) -> None:  # fmt: skip
    """Tell everyone, and wait for everyone, in the slot's generation.

    Args:
        everyone: bit r for every rank.
        step: as ``publish``.
        count: begin a new generation first (a slot used for barriers alone).
        others: as ``stage``.
    """
    launch(
        barrier_kernel, (1,),
        counters, board, boards, error, slot, rank, _bits(everyone), step, timeout_ns,
        COUNT=count, N=boards.numel(), num_warps=1, **launched_early(boards.device),
    )  # fmt: skip


def locate(
    counters: Tensor, board: Tensor, regions: Tensor, error: Tensor, table: Tensor, *,
    slot: int, sources: int, offsets: Sequence[int], present: Sequence[int], nan_address: int,
    step: int, timeout_ns: int,
) -> None:  # fmt: skip
    """Wait for the sources and write where their parts are.

    Args:
        regions (int64, [N], cuda): addresses of all ranks' regions of the slot.
        table (int64, [len(offsets), N], cuda): overwritten; 0 for ranks that are not present,
        ``nan_address`` for late ones.
        sources: bit s: wait for rank s.
        offsets: of at most ``TABLE_PARTS`` parts in a region, bytes.
        present: per part, bit s: rank s has it (this rank's own may be present without being waited
            for).
        nan_address: local memory of NaN as large as any of the parts.
        step: of the op call that staged the generation here.
        others: as ``stage``.
    """
    zeros = (0,) * TABLE_PARTS
    launch(
        locate_kernel, (1,),
        counters, board, regions, error, table, nan_address, slot, _bits(sources), step, timeout_ns,
        *(*offsets, *zeros)[:TABLE_PARTS], *map(_bits, (*present, *zeros)[:TABLE_PARTS]),
        PARTS=len(offsets), N=regions.numel(), num_warps=1, **launched_early(regions.device),
    )  # fmt: skip


def fetch(
    counters: Tensor, board: Tensor, regions: Tensor, error: Tensor, target: Tensor, *,
    slot: int, source: int, offset: int, step: int, timeout_ns: int,
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
        counters, board, regions, error, target, slot, source, offset, words, step, timeout_ns,
        WORD=word, BLOCK=_COPY_BLOCK, N=regions.numel(), num_warps=1,
    )  # fmt: skip


def _bits(mask: int) -> int:
    """A mask of up to 64 ranks as a signed 64-bit integer."""
    return mask - (1 << 64) if mask >> 63 else mask
