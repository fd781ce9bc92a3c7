# SPDX-License-Identifier: Apache-2.0
"""When one rank calls wrongly: ``CULA_CP_CHECK=1`` tells all, else its peers hear of it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from op_calls import (
    CASES,
    FUNCTIONS,
    Change,
    Transport,
    arguments,
    empty,
    one_differs,
    shorter,
    wrong_dtype,
)
from torch import Tensor

from cptransport import (
    CapabilityError,
    CPContext,
    OpInputError,
    PeerFailedError,
    TransportClosedError,
    TransportTimeoutError,
    UnsupportedOptionError,
    ops,
    threads,
)
from cptransport.testing.op_rank import run_rank

#: op, what rank 1 does, the error class, its words. Seen by rank 1 alone, without its peers.
OWN_MISTAKES: list[tuple[str, Change, type[Exception], str]] = [
    ("kda", wrong_dtype("beta"), OpInputError, "beta must be bfloat16"),
    ("kda", shorter("q"), OpInputError, "rank 1 has 7 local rows, its plan says 8"),
    ("kda", empty("q"), OpInputError, "rank 1 has 0 local rows, its plan says 8"),
    ("kda", lambda given: given.update(lower_bound=-1.0), OpInputError, "needs use_gate_in"),
    ("kda", lambda given: given.update(cu_seqlens=[0, 1]), UnsupportedOptionError, "not served"),
    ("kda", lambda given: given.update(betta=1), TypeError, "unexpected keyword argument 'betta'"),
    ("ssd", shorter("x"), OpInputError, "rank 1 has 7 local rows"),
    ("ssd", lambda given: given.update(chunk_size=40), OpInputError, "power of two"),
    ("conv1d", wrong_dtype("x"), OpInputError, "x must be bfloat16"),
    ("conv1d", empty("x"), OpInputError, "rank 1 has 0 local rows"),
    ("mixer", shorter("zxbcdt"), OpInputError, "local rows"),
    ("mixer", lambda given: given.update(ngroups=5), OpInputError, "channels"),
]


@pytest.mark.parametrize(("op", "change", "kind", "words"), OWN_MISTAKES)
def test_52_with_the_check_all_ranks_raise_the_same(
    op: str,
    change: Change,
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Report 52, and everybody goes on: the error came before anything was staged."""
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    start = time.monotonic()
    results = one_differs(op, change)
    assert time.monotonic() - start < 10
    assert len({(type(error), str(error)) for error, _ in results}) == 1
    error = results[0][0]
    assert type(error) is kind
    assert "rank 1: " in str(error)
    assert words in str(error)
    assert [after for _, after in results] == ["usable"] * 3


@pytest.mark.parametrize(("op", "change", "kind", "words"), OWN_MISTAKES)
def test_52_without_the_check_the_peers_hear_of_it(
    op: str, change: Change, kind: type[Exception], words: str
) -> None:
    start = time.monotonic()
    results = one_differs(op, change, timeout_s=20.0)
    assert time.monotonic() - start < 10  # they hear of it, they do not time out
    own = results[1][0]
    assert type(own) is kind
    assert words in str(own)
    # Rank 0 needs nobody in the forward, so it may learn of it one op later.
    heard = [each for each in (results[0], results[2]) if isinstance(each[0], PeerFailedError)]
    assert isinstance(results[2][0], PeerFailedError), results
    for error, after in heard:
        assert error.peer == 1
        assert words in str(error)
        assert after == "closed"
    assert results[0][1] in ("closed", "PeerFailedError")
    assert results[1][1] in ("closed", "PeerFailedError", "TransportTimeoutError")


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_a_wrong_gradient_for_an_explicit_backward(
    op: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", str(int(checked)))

    def body(transport: Transport) -> str:
        given = arguments(op, transport)
        if op == "kda":
            kda = ops.kda_forward(**given)
            output, saved, backward = kda.o, kda.saved, ops.kda_backward
        else:
            ssd = ops.ssd_forward(**given)
            output, saved, backward = ssd.y, ssd.saved, ops.ssd_backward
        try:
            backward(saved, output[:, 1:] if transport.rank == 1 else output)
        except (OpInputError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "needs nobody"

    results = threads.run(body, 3, 20.0)
    name = "do" if op == "kda" else "dy"
    if checked:
        assert len(set(results)) == 1
        assert results[0].startswith(f"OpInputError: rank 1: {name} must be")
    else:
        assert results[0].startswith("PeerFailedError: rank 1 failed: OpInputError: " + name)
        assert results[1].startswith(f"OpInputError: {name} must be")


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_a_handoff_needs_a_pairwise_transport(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_COMPOSITION", "handoff")

    def body(transport: Transport) -> str:
        pairwise, transport.capabilities = (
            transport.capabilities,
            replace(transport.capabilities, pairwise=False),
        )
        with pytest.raises(CapabilityError, match="handoff") as caught:
            FUNCTIONS[op](**arguments(op, transport))
        transport.capabilities = pairwise
        FUNCTIONS[op](**arguments(op, transport))  # nothing was staged
        return str(caught.value)

    assert len(set(threads.run(body, 3, 20.0))) == 1


def test_every_rank_may_raise_and_go_on() -> None:
    """Without the check too: all raised in the same op before staging, each its own error."""

    def body(transport: Transport) -> str:
        for name in ("q", "v", "beta"):
            given = arguments("kda", transport)
            given[name] = given[name][:, :-1]
            with pytest.raises(OpInputError):
                ops.chunk_kda(**given)
        run_rank(transport, CASES["kda"])
        return "usable"

    assert threads.run(body, 3, 20.0) == ["usable"] * 3


def test_a_rank_that_fails_before_its_backward_reaches_its_peers() -> None:
    """A hook of the user's own raises; who owns the transport tells the peers."""

    def body(transport: Transport) -> str:
        case = CASES["kda"]
        local: dict[str, Tensor] = {
            n: case.plan.shard(x, transport.rank).clone().requires_grad_()
            for n, x in case.tokens.items()
        }
        o, _ = ops.chunk_kda(**local, cp_context=CPContext(case.plan, transport))
        if transport.rank == 1:
            o.register_hook(fail)
        try:
            o.sum().backward()
        except RuntimeError as error:
            transport.abandon(error)
            return "own"
        except (PeerFailedError, TransportTimeoutError) as error:
            return str(error)
        return "needs nobody"

    def fail(grad: Tensor) -> None:
        raise RuntimeError("the user's hook failed")

    results = threads.run(body, 3, 3.0)
    assert results[1] == "own"
    assert "rank 1" in results[0]


def test_peers_of_a_rank_that_left_are_told() -> None:
    def body(transport: Transport) -> str:
        if transport.rank == 1:
            raise KeyError("bad data loader")
        with pytest.raises(PeerFailedError, match="bad data loader") as caught:
            run_rank(transport, CASES["kda"])
        assert caught.value.peer == 1
        with pytest.raises(TransportClosedError):
            run_rank(transport, CASES["kda"])
        return "told"

    start = time.monotonic()
    with pytest.raises(KeyError, match="bad data loader"):
        threads.run(body, 3, 30.0)
    assert time.monotonic() - start < 10
