# SPDX-License-Identifier: Apache-2.0
"""An engine's op on a sharded stream in one process, against the token-by-token recurrence in
float64.

The exchange is done here in float64 torch, straight from the algebra, so that only the engine is
under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cptransport.engines import KDAInputs, KDAOptions, LocalSegment, Need, OutputGrads
from cptransport.engines.naive import naive_kda


@dataclass
class Case:
    """Global inputs of one KDA call.

    ``cu_seqlens`` are offsets of the sequences (packed, or one sequence with B rows); ``cuts`` the
    rows where the next rank begins.
    """

    cu_seqlens: list[int]
    cuts: list[int] = field(default_factory=list)
    B: int = 1
    H: int = 1
    HV: int = 1
    K: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    gate: float = -0.5
    options: dict[str, Any] = field(default_factory=dict)
    a_log: bool = True
    dt_bias: bool = True
    seed: int = 0

    def inputs(self) -> dict[str, Tensor]:
        """Return fresh random inputs, gradients of outputs included (``do``, ``dfinal``)."""
        gen = torch.Generator().manual_seed(self.seed)
        T, N = self.cu_seqlens[-1], len(self.cu_seqlens) - 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        rows = N * self.B if self.B == 1 else self.B
        x = {
            "q": normal(self.B, T, self.H, self.K),
            "k": normal(self.B, T, self.H, self.K),
            "v": normal(self.B, T, self.HV, self.V),
            "g": self.gate
            * torch.rand(self.B, T, self.HV, self.K, generator=gen, dtype=torch.float64),
            "beta": torch.rand(self.B, T, self.HV, generator=gen, dtype=torch.float64),
            "initial_state": normal(rows, self.HV, self.K, self.V),
            "do": normal(self.B, T, self.HV, self.V),
            "dfinal": normal(rows, self.HV, self.K, self.V),
        }
        if not self.options.get("use_qk_l2norm_in_kernel"):
            x["q"], x["k"] = (torch.nn.functional.normalize(x[name], dim=-1) for name in ("q", "k"))
        if self.options.get("use_gate_in_kernel"):
            x["g"] = normal(*x["g"].shape)
            if self.a_log:
                x["A_log"] = 0.5 * normal(self.HV)
            if self.dt_bias:
                x["dt_bias"] = normal(self.HV, self.K)
        if self.options.get("use_beta_sigmoid_in_kernel"):
            x["beta"] = normal(*x["beta"].shape)
        return x


def rounded(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs as the engine sees them: token tensors in the case's dtype, the rest in
    float32."""
    exact = {"initial_state", "dfinal", "A_log", "dt_bias", "g"}
    return {
        name: value.to(torch.float32 if name in exact else case.dtype).to(case.device)
        for name, value in x.items()
    }


def reference(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs and every gradient of the unsharded recurrence, in float64."""
    x = {name: value.double().cpu() for name, value in x.items()}
    leaves = {
        name: value.requires_grad_() for name, value in x.items() if name not in ("do", "dfinal")
    }
    o, final = naive_kda(
        **leaves, cu_seqlens=case.cu_seqlens if case.B == 1 else None, **case.options
    )
    names = list(leaves)
    grads = torch.autograd.grad(
        (o * x["do"]).sum() + (final * x["dfinal"]).sum(),
        [leaves[name] for name in names],
        allow_unused=True,
    )
    result = {"o": o.detach(), "final_state": final.detach()}
    for name, grad in zip(names, grads, strict=True):
        result["d" + name] = torch.zeros_like(leaves[name]) if grad is None else grad
    return result


def shard(case: Case) -> list[list[LocalSegment]]:
    """Return the segments of each rank."""
    T = case.cu_seqlens[-1]
    edges = [0, *case.cuts, T]
    ranks: list[list[LocalSegment]] = []
    for lo, hi in zip(edges, edges[1:], strict=False):
        mine = []
        for s, (a, b) in enumerate(zip(case.cu_seqlens, case.cu_seqlens[1:], strict=False)):
            start, stop = max(a, lo), min(b, hi)
            owns_empty = a == b and (lo <= a < hi or (a == T and hi == T and lo < hi))
            if start < stop or owns_empty:
                start, stop = (a, b) if owns_empty else (start, stop)
                mine.append(LocalSegment(start - lo, stop - lo, s, start == a, stop == b))
        ranks.append(mine)
    return ranks


class _Chain:
    """What the exchange knows: summaries per (rank, local segment)."""

    def __init__(self, ranks: list[list[LocalSegment]], B: int) -> None:
        self.B = B
        self.order: dict[int, list[tuple[int, int]]] = {}
        for r, segments in enumerate(ranks):
            for i, segment in enumerate(segments):
                self.order.setdefault(segment.sequence, []).append((r, i))

    def incoming(
        self, tables: list[dict[str, Tensor]], seeds: list[Tensor], *, reverse: bool
    ) -> list[Tensor]:
        result = [seed.double().clone() for seed in seeds]
        for chain in self.order.values():
            chain = chain[::-1] if reverse else chain
            for b in range(self.B):
                state = None
                for r, i in chain:
                    row = i * self.B + b
                    if state is not None:
                        result[r][row] = state
                    M = tables[r]["transition"][row].double()
                    E = tables[r]["state"][row].double()
                    after = (M.mT if reverse else M) @ state if state is not None else 0.0
                    state = after + E
        return [table.float() for table in result]


def sharded(engine: Any, case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``reference`` does, computed rank by rank by an engine."""
    ranks = shard(case)
    T, B = case.cu_seqlens[-1], case.B
    edges = [0, *case.cuts, T]
    options = KDAOptions(scale=case.K**-0.5, **case.options)
    shape = (case.HV, case.K, case.V)
    chain = _Chain(ranks, B)
    device = x["q"].device

    def per_rank(name: str, r: int) -> Tensor:
        return x[name][:, edges[r] : edges[r + 1]]

    def seeds(name: str, flag: str, segments: list[LocalSegment]) -> Tensor:
        table = torch.zeros(len(segments) * B, *shape, device=device)
        for i, segment in enumerate(segments):
            if getattr(segment, flag):
                for b in range(B):
                    table[i * B + b] = x[name][segment.sequence * B + b]
        return table

    def tables(segments: list[LocalSegment]) -> dict[str, Tensor]:
        rows = len(segments) * B
        # NaN where nothing was written: must not be read.
        return {
            "state": torch.full((rows, *shape), torch.nan, device=device),
            "transition": torch.full((rows, case.HV, case.K, case.K), torch.nan, device=device),
        }

    forward_need = [
        [Need(not s.last, not s.first and not s.last) for s in segments] for segments in ranks
    ]
    backward_need = [
        [Need(not s.first, not s.first and not s.last) for s in segments] for segments in ranks
    ]
    locals_, outs, seeds_in = [], [], []
    for r, segments in enumerate(ranks):
        out = tables(segments)
        seed = seeds("initial_state", "first", segments)
        inputs = KDAInputs(
            *(per_rank(name, r) for name in ("q", "k", "v", "g", "beta")),
            x.get("A_log"),
            x.get("dt_bias"),
            seed,
            options,
        )
        locals_.append(engine.forward_local(inputs, segments, forward_need[r], out))
        outs.append(out)
        seeds_in.append(seed)
    incoming = chain.incoming(outs, seeds_in, reverse=False)
    finished = [
        engine.forward_finish(local, lambda r=r: incoming[r]) for r, local in enumerate(locals_)
    ]

    outs, seeds_out, grads = [], [], []
    for r, segments in enumerate(ranks):
        out = tables(segments)
        seed = seeds("dfinal", "last", segments)
        grads.append(
            engine.backward_local(
                finished[r].saved, OutputGrads(per_rank("do", r), seed), backward_need[r], out
            )
        )
        outs.append(out)
        seeds_out.append(seed)
    outgoing = chain.incoming(outs, seeds_out, reverse=True)
    results = [
        engine.backward_finish(grad, lambda r=r: outgoing[r]) for r, grad in enumerate(grads)
    ]

    final = torch.zeros_like(x["initial_state"])
    dinitial = torch.zeros_like(final)
    for r, segments in enumerate(ranks):
        for i, segment in enumerate(segments):
            for b in range(B):
                if segment.last:
                    final[segment.sequence * B + b] = finished[r].outgoing[i * B + b]
                if segment.first:
                    dinitial[segment.sequence * B + b] = results[r].incoming[i * B + b]
    result = {
        "o": torch.cat([f.output for f in finished], 1),
        "final_state": final,
        "dinitial_state": dinitial,
    }
    for name in ("q", "k", "v", "g", "beta"):
        result["d" + name] = torch.cat([res.inputs[name] for res in results], 1)
    for name in ("A_log", "dt_bias"):
        if name in x:
            result["d" + name] = sum(res.inputs[name] for res in results)
    return result


def errors(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, rms: bool = False
) -> dict[str, float]:
    """Return the relative error of every tensor: largest over largest, or root mean squares."""
    found = {}
    for name, want in expected.items():
        got = actual[name].double().cpu()
        difference = got - want
        scale = (
            (want.square().mean().sqrt() if rms else want.abs().max())
            if want.numel()
            else torch.tensor(0.0)
        )
        error = (
            (difference.square().mean().sqrt() if rms else difference.abs().max())
            if want.numel()
            else scale
        )
        # A reference of zeros is met exactly or not at all.
        found[name] = (
            float(error / scale) if scale > 0 else (0.0 if float(error) == 0 else float("inf"))
        )
    return found
