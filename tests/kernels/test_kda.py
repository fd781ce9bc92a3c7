# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of KDA against the recurrence: ranks, packing, options, gates, padding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kda_chain import Case, errors, reference, rounded, sharded

import cptransport.engines.triton.kda as triton_kda
from cptransport.engines import KDAInputs, KDAOptions, LocalSegment, Need, OpFacts, OutputGrads
from cptransport.engines.triton import KDA_ENGINE
from cptransport_kernels.launch import count_launches
from cptransport_kernels.pieces import build_pieces

ALL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}
BOUNDED = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}


def check(case: Case, x: dict[str, torch.Tensor] | None = None, limit: float = 2e-5) -> None:
    x = rounded(case, case.inputs()) if x is None else x
    found = errors(sharded(KDA_ENGINE, case, x), reference(case, x))
    assert max(found.values()) < limit, found


@pytest.mark.parametrize(
    "sizes",
    [
        {"cu_seqlens": [0, 40], "cuts": []},
        {"cu_seqlens": [0, 40], "cuts": [13]},
        {"cu_seqlens": [0, 33], "cuts": [0, 1, 32]},
        {"cu_seqlens": [0, 7, 7, 8, 90], "cuts": [30, 60], "H": 2, "HV": 2, "V": 64},
        {"cu_seqlens": [0, 0, 70, 70], "cuts": [64, 64], "K": 64},
        {"cu_seqlens": [0, 36], "cuts": [20], "B": 2, "HV": 2},
        {"cu_seqlens": [0, 40], "cuts": [13], "H": 3, "HV": 3, "K": 8, "V": 12},
    ],
)
def test_matches_recurrence_on_every_rank(sizes: dict[str, Any], device: str) -> None:
    check(Case(**{"K": 32, "V": 32, **sizes}, device=device))


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (ALL, {}),
        (BOUNDED, {"a_log": False}),
        ({**ALL, **BOUNDED}, {"dt_bias": False}),
        ({"use_gate_in_kernel": True}, {"a_log": False, "dt_bias": False}),
        ({"use_beta_sigmoid_in_kernel": True}, {}),
    ],
)
def test_options_and_their_gradients(
    options: dict[str, Any], given: dict[str, bool], device: str
) -> None:
    check(
        Case([0, 60], [33], HV=2, K=32, V=64, options=options, device=device, **given),
    )


def test_float16(device: str) -> None:
    check(Case([0, 60], [33], K=32, V=32, dtype=torch.float16, device=device), limit=4e-3)


def test_cut_segments_equal_whole_ones(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kda, "piece_tokens", lambda *_: 32)
    check(Case([0, 100, 101, 150], [20, 120], K=32, V=64, device=device))
    check(Case([0, 70], [35], B=2, K=64, V=32, device=device))


@pytest.mark.parametrize("gate", [0.0, -5.0, -20.0, -1000.0])
def test_constant_gates(gate: float, device: str) -> None:
    case = Case([0, 70], [33], K=32, V=32, device=device)
    x = rounded(case, case.inputs())
    x["g"].fill_(gate)
    check(case, x)


def test_infinite_decay_forgets_exactly(device: str) -> None:
    case = Case([0, 70], [33], K=32, V=32, device=device)
    x = rounded(case, case.inputs())
    x["g"][:, [20, 50]] = -math.inf
    check(case, x)
    other = {**x, "v": x["v"].clone(), "initial_state": 3 * x["initial_state"]}
    other["v"][:, :20] *= -2
    a, b = (sharded(KDA_ENGINE, case, values) for values in (x, other))
    assert torch.equal(a["o"][:, 20:], b["o"][:, 20:])
    assert not torch.equal(a["o"][:, :20], b["o"][:, :20])


def test_gate_gradient_of_tokens_that_see_only_themselves_is_zero(device: str) -> None:
    case = Case([0, 70], [33], K=32, V=32, device=device)
    x = rounded(case, case.inputs())
    x["g"].fill_(-math.inf)
    got = sharded(KDA_ENGINE, case, x)
    assert torch.equal(got["dg"], torch.zeros_like(got["dg"]))
    assert got["dq"].abs().min() > 0


def test_one_token_halves_the_state(device: str) -> None:
    case = Case([0, 1], K=32, V=32, device=device)
    x = rounded(case, case.inputs())
    x["g"].fill_(math.log(0.5))
    x["beta"].zero_()
    x["initial_state"].fill_(1.0)
    final = sharded(KDA_ENGINE, case, x)["final_state"]
    torch.testing.assert_close(final, torch.full_like(final, 0.5), rtol=1e-6, atol=0)


def rank_call(
    segments: list[LocalSegment],
    tokens: int,
    need: Need,
    grad_need: Need,
    device: str,
    *,
    poison: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    heads: int = 1,
    dim: int = 32,
    outgoing: bool = True,
    leaving: Callable[[torch.Tensor], torch.Tensor] = lambda table: table,
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Run one rank's forward and backward with random summaries of its peers."""
    case = Case([0, tokens], H=heads, HV=heads, K=dim, V=dim, dtype=dtype, device=device)
    x = rounded(case, case.inputs())
    for name in ("q", "k", "v", "g", "beta", "do"):
        if poison:
            x[name][:, poison] = math.nan
    rows = len(segments)
    table = torch.randn(rows, heads, dim, dim, device=device)
    out = {name: torch.full_like(table, math.nan) for name in ("state", "transition")}
    tokens_in = (x[name] for name in ("q", "k", "v", "g", "beta"))
    inputs = KDAInputs(*tokens_in, None, None, None, KDAOptions(scale=1.0), outgoing)
    local = KDA_ENGINE.forward_local(inputs, segments, [need] * rows, out)
    finished = KDA_ENGINE.forward_finish(local, lambda: table)
    local_grad = KDA_ENGINE.backward_local(
        finished.saved, OutputGrads(x["do"], None), [grad_need] * rows, out
    )
    return finished, KDA_ENGINE.backward_finish(local_grad, lambda: leaving(table)), out


def test_rows_of_no_segment_are_zero_and_never_read(device: str) -> None:
    segments = [LocalSegment(3, 20, 0, False, True), LocalSegment(25, 40, 1, True, False)]
    padding = [*range(3), *range(20, 25), *range(40, 45)]
    finished, grads, _ = rank_call(
        segments, 45, Need(False, False), Need(True, False), device, poison=padding
    )
    for tensor in (finished.output, *(grads.inputs[name] for name in ("q", "k", "v", "g", "beta"))):
        assert tensor is not None
        assert torch.equal(tensor[:, padding], torch.zeros_like(tensor[:, padding]))
        assert tensor.isfinite().all()
        assert tensor[:, 3:20].abs().max() > 0


#: What every rank launches.
OWN = Counter(
    f"kda_{name}_kernel"
    for name in (
        "prepare", "forward_pass", "remake", "backward_pass", "pair_backward", "chunk_backward",
        "finish_grads",
    )
)  # fmt: skip
#: What a state that enters costs: the correction of outputs, and dE.
ENTERED = Counter(["kda_correct_kernel", "kda_entering_grad_kernel"])


@pytest.mark.parametrize(
    ("first", "last", "outgoing", "launches", "kept"),
    [
        (True, True, False, OWN, {"s_in"}),
        (True, True, True, OWN, {"s_in"}),
        (True, False, True, OWN, {"s_in"}),
        (False, False, True, OWN + ENTERED, {"s_in", "m", "r"}),
        (False, True, False, OWN + ENTERED, {"s_in", "r"}),
        (False, True, True, OWN + ENTERED + Counter(["fold_kernel"]), {"s_in", "m", "r"}),
    ],
    ids=["only", "only, states", "first", "interior", "last", "last, states"],
)
def test_each_segment_does_what_the_table_of_the_algebra_says(
    first: bool, last: bool, outgoing: bool, launches: Counter[str], kept: set[str], device: str
) -> None:
    segments = [LocalSegment(0, 70, 0, first, last)]
    interior = not first and not last
    needs = Need(not last, interior), Need(not first, interior)
    arguments = (segments, 70, *needs, device)
    rank_call(*arguments, outgoing=outgoing)
    before = build_pieces.cache_info()
    with count_launches() as counter:
        finished, _, out = rank_call(*arguments, outgoing=outgoing)
    assert counter == launches
    # Tables are uploaded once.
    assert build_pieces.cache_info().misses == before.misses
    names = ("s_in", "m", "r", "aqk", "tinv", "rnorm")
    saved = dict(zip(names, finished.saved.tensors[-6:], strict=True))
    assert {name for name, x in saved.items() if x is not None} == {*kept, "aqk", "tinv"}
    assert (finished.outgoing is not None) == (last and outgoing)
    written = {name for name, table in out.items() if not table.isnan().any()}
    wanted = {"state"} if not (first and last) else set()
    assert written == (wanted | {"transition"} if interior else wanted)


def test_a_backward_waits_as_late_as_it_can(device: str) -> None:
    """With overlap the exchange runs beside all that needs no gradient of a leaving state."""
    before: Counter[str] = Counter()

    def leaving(table: torch.Tensor) -> torch.Tensor:
        before.update(counter)
        return table

    segments = [LocalSegment(0, 70, 0, False, False)]
    with count_launches() as counter:
        rank_call(
            segments,
            70,
            Need(True, True),
            Need(True, True),
            device,
            outgoing=False,
            leaving=leaving,
        )
    assert counter - before == Counter(
        f"kda_{name}_kernel"
        for name in ("backward_pass", "pair_backward", "chunk_backward", "finish_grads")
    )


def test_same_inputs_give_the_same_bits(device: str) -> None:
    segments = [LocalSegment(0, 70, 0, False, False)]
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(rank_call(segments, 70, Need(True, True), Need(True, True), device))
    (a, da, out_a), (b, db, out_b) = runs
    assert torch.equal(a.output, b.output)
    assert all(torch.equal(out_a[name], out_b[name]) for name in out_a)
    for name, grad in da.inputs.items():
        assert grad is None or torch.equal(grad, db.inputs[name])


def facts(**changes: Any) -> OpFacts:
    known: dict[str, Any] = {
        "op": "kda",
        "device_type": "cuda",
        "world_size": 2,
        "batch": 1,
        "heads": 2,
        "value_heads": 4,
        "key_dim": 128,
        "value_dim": 96,
        "dtypes": dict.fromkeys(("q", "k", "v", "g", "beta"), torch.bfloat16),
        "state_dtype": torch.float32,
        "max_segments": 3,
        "max_tokens": 100,
        "requires_grad": frozenset({"q"}),
        "options": KDAOptions(scale=1.0),
    }
    return OpFacts(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"op": "ssd"}, "serves kda"),
        ({"key_dim": 257}, "needs K from 1 to 256"),
        ({"value_dim": 300}, "needs V from 1 to 256"),
        ({"dtypes": {"q": torch.float64}, "state_dtype": torch.float64}, "needs q in bfloat16"),
        ({"device_type": "xpu"}, "needs CUDA tensors"),
    ],
)
def test_eligible_says_why_not(changes: dict[str, Any], reason: str | None) -> None:
    found = KDA_ENGINE.eligible(facts(**changes))
    assert found == reason if reason is None else reason in (found or "")


def test_slots_have_the_callers_sizes() -> None:
    state, transition = KDA_ENGINE.slot_parts(facts(batch=2))
    assert (state.shape, state.dtype) == ((6, 4, 128, 96), torch.float32)
    assert transition.shape == (6, 4, 128, 128)
