# SPDX-License-Identifier: Apache-2.0
"""Calls on three ranks of which one does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cptransport import CPContext, CPTransportError, TransportClosedError, ops, threads
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_rank import run_rank

Transport = threads.ThreadTransport

SPECS = {
    "kda": OpSpec("kda", [0, 7, 24], 3, optional=("initial_state",)),
    "ssd": OpSpec("ssd", [0, 7, 24], 3, options={"chunk_size": 16}),
    "conv1d": OpSpec("conv1d", [0, 7, 24], 3),
    "mixer": OpSpec("mixer", [0, 7, 24], 3, options={"chunk_size": 16}),
}
CASES = {op: OpCase.of(spec) for op, spec in SPECS.items()}

Change = Callable[[dict[str, Any]], None]


def arguments(op: str, transport: Transport) -> dict[str, Any]:
    case = CASES[op]
    found: dict[str, Any] = {n: case.plan.shard(x, transport.rank) for n, x in case.tokens.items()}
    found.update(case.parameters)
    if case.initial is not None:
        found["initial_state"] = case.initial
    found = {name: x.clone() for name, x in found.items()}
    found.update(case.spec.options)
    if op == "mixer":
        found.update(headdim=12, ngroups=3, conv1d_bias=None)
    return {**found, "cp_context": CPContext(case.plan, transport)}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "kda": ops.chunk_kda,
    "ssd": ops.mamba_chunk_scan_combined,
    "conv1d": ops.causal_conv1d,
    "mixer": ops.mamba_split_conv1d_scan_combined,
}


def one_differs(op: str, change: Change, timeout_s: float = 20.0) -> list[Any]:
    """Call with a change on rank 1; return what each rank raised, and what it raises after that."""

    def body(transport: Transport) -> tuple[Exception | None, str]:
        given = arguments(op, transport)
        if transport.rank == 1:
            change(given)
        error: Exception | None = None
        try:
            FUNCTIONS[op](**given)
        except Exception as caught:
            error = caught
        try:
            run_rank(transport, CASES[op])
            after = "usable"
        except TransportClosedError:
            after = "closed"
        except CPTransportError as caught:
            after = type(caught).__name__
        return error, after

    return threads.run(body, 3, timeout_s)


def wrong_dtype(name: str) -> Change:
    return lambda given: given.update({name: given[name].long()})


def shorter(name: str) -> Change:
    return lambda given: given.update({name: given[name][:, 1:]})


def empty(name: str) -> Change:
    return lambda given: given.update({name: given[name][:, :0]})
