# SPDX-License-Identifier: Apache-2.0
"""The distributed oracle: an op on its ranks against the token-by-token recurrence on the whole.

Two halves. ``op_rank.run_rank`` is one rank's half, forward and backward, on any transport.
``judge`` takes what all ranks brought, computes the fp64 reference of the unsharded call, and
compares every output, state and gradient on every rank by itself, sums over ranks where inputs are
replicated, and the counted bytes with ``plan.volume``. It makes all comparisons before anybody may
draw a verdict, and it is a pure function: ranks that exchanged their runs agree on the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cptransport.composition import COMPOSITIONS
from cptransport.engines import naive
from cptransport.testing.numerics import TOLERANCES, relative_error, relative_rms, rms_tolerance
from cptransport.testing.op_cases import INITIAL, OpCase, owned_states
from cptransport.testing.op_rank import RankRun
from cptransport.transport import PartSpec, Slot

__all__ = ["Comparison", "Reference", "check", "judge", "planned_bytes", "reference"]


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Attributes:
        rank: whose; None for a sum over ranks.
        name: of the output or gradient, or ``bytes <direction> <part>``.
        measure: ``max`` (largest error over largest reference value), ``rms`` (relative), ``zero``
            (must be exactly zero) or ``bytes``.
        error, limit: the call is right when the error is not above the limit.
        scale: the largest reference value; nothing is shown by a comparison with zeros alone.
    """

    rank: int | None
    name: str
    measure: str
    error: float
    limit: float
    scale: float

    @property
    def ok(self) -> bool:
        """Whether the comparison holds; a NaN does not."""
        return self.error <= self.limit

    def __str__(self) -> str:
        where = "sum over ranks" if self.rank is None else f"rank {self.rank}"
        verdict = "ok" if self.ok else "WRONG"
        return (
            f"{where:14}  {self.name:26}  {self.measure:5}  {self.error:9.2e} <= {self.limit:7.1e}"
            f"  (reference {self.scale:8.2e})  {verdict}"
        )


@dataclass(frozen=True)
class Reference:
    """Output, final states and gradients (by input name) of the unsharded call."""

    output: Tensor
    final: Tensor
    grads: Mapping[str, Tensor]


def reference(case: OpCase) -> Reference:
    """Return the unsharded call token by token in fp64, differentiated by autograd."""
    spec = case.spec
    inputs = {**case.tokens, **case.parameters}
    if case.initial is not None:
        inputs[INITIAL[spec.op]] = case.initial
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    arguments: dict[str, Any] = {**spec.options, **leaves}
    arguments.update(cu_seqlens=case.plan.cu_seqlens, padded_cu_seqlens=case.plan.padded_cu_seqlens)
    arguments.pop("chunk_size", None)
    if spec.op == "mixer":
        arguments.setdefault("conv1d_bias", None)
        arguments.update(headdim=spec.value_dim, ngroups=spec.heads)
        arguments.update(stored_as=getattr(torch, spec.dtype))
    function: Any = {
        "kda": naive.naive_kda,
        "ssd": naive.naive_ssd,
        "conv1d": naive.naive_causal_conv1d,
        "mixer": naive.naive_mamba_split,
    }[spec.op]
    output, final = function(**arguments)
    entering = ((output, case.grad_output.double()), (final, case.grad_final.double()))
    # Without tokens and initial states nothing depends on the inputs.
    loss = sum((x * grad).sum() for x, grad in entering) + sum(0 * x.sum() for x in leaves.values())
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, tuple(leaves.values()))
    return Reference(output.detach(), final.detach(), dict(zip(leaves, grads, strict=True)))


def judge(case: OpCase, runs: Sequence[RankRun], *, exact_bytes: bool = True) -> list[Comparison]:
    """Compare what the ranks brought with the unsharded call; every comparison, right or wrong.

    Args:
        case: the whole call.
        runs: of all ranks, in rank order.
        exact_bytes: False lets a transport count more than the plan says.
    """
    judged = _Judge(case, reference(case))
    for rank, run in enumerate(runs):
        judged.rank(rank, run)
    judged.sums(runs)
    judged.bytes(runs, exact_bytes)
    return judged.comparisons


class _Judge:
    def __init__(self, case: OpCase, right: Reference) -> None:
        self.case, self.right = case, right
        self.comparisons: list[Comparison] = []
        self.dtype = getattr(torch, case.spec.dtype)
        self.initial = INITIAL[case.spec.op]

    def rank(self, rank: int, run: RankRun) -> None:
        """Compare what belongs to one rank alone."""
        case, plan = self.case, self.case.plan
        padding = torch.isin(plan.for_rank(rank).index, case.padding_rows)
        streams = {"output": (run.output, self.right.output)}
        streams.update({f"d{n}": (run.grads[n], self.right.grads[n]) for n in case.tokens})
        for name, (actual, whole) in streams.items():
            self._close(rank, name, actual, plan.shard(whole, rank))
            if padding.any():
                self._zero(rank, f"{name}, padding", actual[:, padding])
        self._state(rank, "final", run.final, self.right.final, first=False)
        # A convolution reads the initial state wherever the halo reaches before the sequence.
        if self.initial in run.grads and case.spec.op != "conv1d":
            actual, whole = run.grads[self.initial], self.right.grads[self.initial]
            self._state(rank, f"d{self.initial}", actual, whole, first=True)
        self._dtypes(rank, run)

    def sums(self, runs: Sequence[RankRun]) -> None:
        """Compare the sum over ranks of what is replicated."""
        for name in (*self.case.parameters, self.initial):
            if name in self.right.grads:
                parts = [run.grads[name] for run in runs]
                total = torch.stack([part.double() for part in parts]).sum(0)
                self._close(None, f"d{name}", total, self.right.grads[name], parts[0].dtype)

    def bytes(self, runs: Sequence[RankRun], exact: bool) -> None:
        """Compare what the transports counted with what the plan says."""
        composition = self.case.spec.composition
        if composition == "auto":
            record = runs[0].record
            ran = record.composition if record else ""
            composition = ran if ran in COMPOSITIONS else "gather"  # a convolution has none
        for direction in ("forward", "backward"):
            planned = planned_bytes(self.case, direction, composition)
            for rank, run in enumerate(runs):
                counted = run.received[direction]
                for part in sorted({*planned, *counted}):
                    want = planned[part][rank] if part in planned else 0
                    got = counted.get(part, 0)
                    error = abs(got - want) if exact else max(0, want - got)
                    name = f"bytes {direction} {part}"
                    self.comparisons.append(Comparison(rank, name, "bytes", error, 0, want))

    def _close(
        self,
        rank: int | None,
        name: str,
        actual: Tensor,
        expected: Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compare by the coarser of the stream's dtype and the tensor's own."""
        if actual.shape != expected.shape:
            self.comparisons.append(Comparison(rank, name, "shape", torch.inf, 0, 0))
            return
        scale = expected.abs().max().item() if expected.numel() else 0.0
        if scale == 0:
            self._zero(rank, name, actual)
            return
        dtypes = (self.dtype, dtype or actual.dtype)
        if min(each.itemsize for each in dtypes) == 2:
            error, limit, measure = relative_rms(actual, expected), rms_tolerance(name), "rms"
        else:
            limit = max(TOLERANCES[each] for each in dtypes)
            error, measure = relative_error(actual, expected), "max"
        self.comparisons.append(Comparison(rank, name, measure, error, limit, scale))

    def _zero(self, rank: int | None, name: str, actual: Tensor) -> None:
        error = float(actual.count_nonzero())  # counts NaN too
        self.comparisons.append(Comparison(rank, name, "zero", error, 0, 0))

    def _state(self, rank: int, name: str, actual: Tensor, whole: Tensor, *, first: bool) -> None:
        """Compare the rows that a rank owns; the others must be zero."""
        owned = owned_states(self.case.plan, rank, self.case.spec.batch, first=first)
        others = [row for row in range(len(whole)) if row not in owned]
        if actual.shape != whole.shape:
            self._close(rank, name, actual, whole)
            return
        if owned:
            self._close(rank, name, actual[owned], whole[owned])
        if others:
            self._zero(rank, f"{name}, not owned", actual[others])

    def _dtypes(self, rank: int, run: RankRun) -> None:
        case, spec = self.case, self.case.spec
        state = self.dtype if spec.op == "conv1d" else spec.state_dtype
        expected = {"output": self.dtype, "final": state}
        expected.update({f"d{n}": x.dtype for n, x in {**case.tokens, **case.parameters}.items()})
        if case.initial is not None:
            expected[f"d{self.initial}"] = case.initial.dtype
        found = {"output": run.output.dtype, "final": run.final.dtype}
        found.update({f"d{name}": grad.dtype for name, grad in run.grads.items()})
        wrong = [
            f"{n} is {found.get(n)}, not {kind}"
            for n, kind in expected.items()
            if found.get(n) != kind
        ]
        name = f"dtypes: {', '.join(wrong)}" if wrong else "dtypes"
        self.comparisons.append(Comparison(rank, name, "dtype", float(len(wrong)), 0, 0))


def planned_bytes(case: OpCase, direction: str, composition: str) -> dict[str, list[int]]:
    """Return per part the bytes that each rank receives, as the plan says."""
    spec, plan = case.spec, case.plan
    heads, keys, values = spec.value_heads, spec.key_dim, spec.value_dim
    rows, state = plan.max_segments * spec.batch, spec.state_dtype
    halo = state if direction == "backward" else getattr(torch, spec.dtype)
    channels = heads * values
    if spec.op == "mixer":
        channels += 2 * spec.heads * keys
    moved = (plan.max_segments * (spec.width - 1), spec.batch, channels)
    parts: list[PartSpec] = []
    if spec.op == "kda":
        parts.append(PartSpec("state", (rows, heads, keys, values), state))
        parts.append(PartSpec("transition", (rows, heads, keys, keys), state))
    if spec.op in ("ssd", "mixer"):
        parts.append(PartSpec("state", (rows, heads, values, keys), state))
        parts.append(PartSpec("transition", (rows, heads), state))
    if spec.op in ("conv1d", "mixer"):
        parts.append(PartSpec("halo", moved, halo))
    return {
        part.name: getattr(plan.volume(Slot("oracle", (part,)), composition), direction)
        for part in parts
    }


def check(case: OpCase, runs: Sequence[RankRun], *, exact_bytes: bool = True) -> list[Comparison]:
    """Judge, and fail when a comparison does not hold. Arguments as ``judge``.

    Raises:
        AssertionError: lists what is wrong, and how to call it again.
    """
    comparisons = judge(case, runs, exact_bytes=exact_bytes)
    wrong = [str(each) for each in comparisons if not each.ok]
    assert not wrong, "\n".join(
        [f"{len(wrong)} of {len(comparisons)} comparisons are wrong", *wrong, repr(case.spec)]
    )
    return comparisons
