# SPDX-License-Identifier: Apache-2.0
"""cuDNN frontend's KDA as a stand-in on the CPU: the schemas of release 1.32.0, and what its engines refuse.

It computes token by token with ``cptransport.engines.naive``, in float32 or float64 where cuDNN has
bfloat16. It is stricter than cuDNN where a mistake would be silent there: a sequence of fewer than
two tokens is an ``AssertionError``, rows that no sequence covers come back as NaN, a gate out of the
kernels' range gives NaN, one sequence means all rows whatever ``cu_seqlens`` says, and an initial
state that was written to before its backward is found.

Variants: ``hopper`` (no summary ops, backward of the plain recurrence only), ``blackwell``,
``concatenated`` (blackwell with the concatenated-summary API) and faulty ones of that.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cptransport.engines.naive import naive_kda
from cptransport_cudnn_summary.library import Library, library_of

_FLAGS = (
    "bool use_qk_l2norm_in_kernel=False, {batch_invariant}bool use_beta_sigmoid_in_kernel=False, "
    "bool allow_neg_eigval=False, bool safe_gate=False, float? gate_lower_bound=None, "
    'str gate_domain="log", Tensor? a_log=None, Tensor? dt_bias=None, '
)
_MAIN = _FLAGS.format(batch_invariant="bool batch_invariant=False, ")
_SUMMARY = _FLAGS.format(batch_invariant="")
FORWARD = (
    "kimi_delta_attention_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, "
    f"float scale, Tensor? initial_state=None, bool output_final_state=False, {_MAIN}"
    "SymInt checkpoint_every_n_tokens=0, ScalarType? checkpoint_dtype=None, str? plan_name=None{more}) "
    "-> (Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "kimi_delta_attention_bwd(Tensor dO, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor cu_seqlens, float scale, Tensor? initial_state=None, Tensor? d_final_state=None, "
    "Tensor? state_checkpoints=None, SymInt checkpoint_every_n_tokens=0, "
    f"{_MAIN}str? plan_name=None{{more}}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
SUMMARY = (
    "kimi_delta_attention_summary(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, "
    f"Tensor? initial_state=None, bool output_transition=False, {_SUMMARY}"
    "bool batch_invariant=False, str? plan_name=None) -> (Tensor, Tensor)"
)
SUMMARY_BACKWARD = (
    "kimi_delta_attention_summary_bwd(Tensor dO, Tensor q, Tensor k, Tensor g, Tensor beta, "
    "Tensor cu_seqlens, float scale, Tensor? d_final_state=None, bool output_transition=False, "
    f"{_SUMMARY}bool batch_invariant=False, str? plan_name=None) -> (Tensor, Tensor)"
)
_PRECEDING = ", Tensor? preceding_state_update=None, Tensor? preceding_transition=None"
_FOLLOWING = ", Tensor? following_state_update=None, Tensor? following_transition=None"


class cudnnGraphNotSupportedError(RuntimeError):  # noqa: N801  # its name there
    """No engine serves the graph."""


@dataclass
class Fake:
    """One variant; ``calls`` counts by op, ``held`` keeps what was given as initial state."""

    hopper: bool
    concatenated: bool = False
    fault: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    library: Library | None = None

    def count(self, op: str) -> None:
        self.calls[op] = self.calls.get(op, 0) + 1

    def assert_untouched(self) -> None:
        """What was given as ``initial_state`` must stay as it is until the backward."""
        for given, copy in self.held:
            assert torch.equal(given, copy), "an initial state was written to after its forward"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        batch_invariant: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_lower_bound: float | None = None,
        gate_domain: str = "log",
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        checkpoint_every_n_tokens: int = 0,
        checkpoint_dtype: torch.dtype | None = None,
        plan_name: str | None = None,
        preceding_state_update: Tensor | None = None,
        preceding_transition: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.count("forward")
        self._check(q, k, v, g, beta, cu_seqlens, safe_gate, a_log, dt_bias, gate_lower_bound)
        if self.hopper:
            if not use_beta_sigmoid_in_kernel:
                assert bool((beta >= 0).all() and (beta <= 1).all()), "old state is dropped wrongly"
            _decline(q.shape[2] != v.shape[2], "needs K = V")
            _decline(allow_neg_eigval, "allow_neg_eigval needs beta in (0, 1)")
            _decline(safe_gate and (a_log is None or dt_bias is None), "needs a_log and dt_bias")
        assert initial_state is not None, "plan-owned buffers are not for several streams"
        _check_states(initial_state, cu_seqlens, v, g)
        self.held.append((initial_state, initial_state.clone()))
        state = self._composed(initial_state, preceding_state_update, preceding_transition, False)
        o, final = _run(
            q,
            k,
            v,
            g,
            beta,
            cu_seqlens,
            scale,
            state,
            _options(
                use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel,
                allow_neg_eigval,
                safe_gate,
                gate_lower_bound,
                a_log,
                dt_bias,
            ),
        )
        return o.to(q.dtype), final if output_final_state else final.new_empty(0), q.new_empty(0)

    def backward(
        self,
        dO: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        initial_state: Tensor | None = None,
        d_final_state: Tensor | None = None,
        state_checkpoints: Tensor | None = None,
        checkpoint_every_n_tokens: int = 0,
        use_qk_l2norm_in_kernel: bool = False,
        batch_invariant: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_lower_bound: float | None = None,
        gate_domain: str = "log",
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        plan_name: str | None = None,
        following_state_update: Tensor | None = None,
        following_transition: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        self.count("backward")
        self.assert_untouched()
        self._check(q, k, v, g, beta, cu_seqlens, safe_gate, a_log, dt_bias, gate_lower_bound)
        if self.hopper:
            _decline(q.shape[2] != v.shape[2], "needs K = V")
            _decline(q.shape[1] != v.shape[1], "GVA")
            _decline(abs(scale - q.shape[2] ** -0.5) > 1e-9, "needs the default scale")
            _decline(use_qk_l2norm_in_kernel, "use_qk_l2norm")
            _decline(use_beta_sigmoid_in_kernel or safe_gate, "raw logits")
            if len(cu_seqlens) == 2:  # it treats all rows as one sequence
                cu_seqlens = cu_seqlens.new_tensor([0, len(q)])
        assert dO.dtype == q.dtype
        assert dO.is_contiguous()
        assert initial_state is not None
        assert d_final_state is not None
        for state in (initial_state, d_final_state):
            _check_states(state, cu_seqlens, v, g)
        d_final_state = self._composed(
            d_final_state, following_state_update, following_transition, True
        )
        given = [q, k, v, g, beta, initial_state, a_log, dt_bias]
        leaves = [None if x is None else x.detach().requires_grad_() for x in given]
        with _own_graph():
            ends = _run(
                *leaves[:5],
                cu_seqlens,
                scale,
                leaves[5],
                _options(
                    use_qk_l2norm_in_kernel,
                    use_beta_sigmoid_in_kernel,
                    allow_neg_eigval,
                    safe_gate,
                    gate_lower_bound,
                    *leaves[6:],
                ),
            )
        wanted = [x for x in leaves if x is not None]
        grads = iter(
            torch.autograd.grad(
                ends, wanted, (dO.to(ends[0].dtype), d_final_state), materialize_grads=True
            )
        )
        return tuple(g.new_empty(0) if x is None else next(grads) for x in leaves)

    def summary(
        self,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        initial_state: Tensor | None = None,
        output_transition: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_lower_bound: float | None = None,
        gate_domain: str = "log",
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        batch_invariant: bool = False,
        plan_name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.count("summary")
        _decline(self.hopper, "kda_summary_frost requires SM100 / SM103 / SM107")
        self._check(k, k, v, g, beta, cu_seqlens, safe_gate, a_log, dt_bias, gate_lower_bound)
        options = _options(
            use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            gate_lower_bound,
            a_log,
            dt_bias,
        )
        _, final = _run(k, k, v, g, beta, cu_seqlens, 1.0, initial_state, options)
        transition = self._transition(k, v, g, beta, cu_seqlens, options)
        return final, transition if output_transition else final.new_empty(0)

    def summary_backward(
        self,
        dO: Tensor,
        q: Tensor,
        k: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        d_final_state: Tensor | None = None,
        output_transition: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_lower_bound: float | None = None,
        gate_domain: str = "log",
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        batch_invariant: bool = False,
        plan_name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.count("summary_backward")
        _decline(self.hopper, "kda_summary_frost requires SM100 / SM103 / SM107")
        self._check(q, k, dO, g, beta, cu_seqlens, safe_gate, a_log, dt_bias, gate_lower_bound)
        assert dO.is_contiguous()
        heads, values, keys = *dO.shape[1:], q.shape[2]
        start = g.new_zeros(len(cu_seqlens) - 1, heads, values, keys).requires_grad_()
        with _own_graph():
            o, final = _run(
                q,
                k,
                torch.zeros_like(dO),
                g,
                beta,
                cu_seqlens,
                scale,
                start,
                _options(
                    use_qk_l2norm_in_kernel,
                    use_beta_sigmoid_in_kernel,
                    allow_neg_eigval,
                    safe_gate,
                    gate_lower_bound,
                    a_log,
                    dt_bias,
                ),
            )
        ends = torch.zeros_like(final) if d_final_state is None else d_final_state
        (grad,) = torch.autograd.grad((o, final), start, (dO.to(o.dtype), ends))
        return grad, grad.new_empty(0)

    def _transition(
        self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, options: dict[str, Any]
    ) -> Tensor:
        count, heads, keys = len(cu) - 1, v.shape[1], k.shape[2]
        eye = torch.eye(keys, dtype=g.dtype).expand(count, heads, keys, keys).contiguous()
        values = v.new_zeros(len(k), heads, keys)
        return _run(k, k, values, g, beta, cu, 1.0, eye, options)[1]

    def _composed(
        self, state: Tensor, updates: Tensor | None, transitions: Tensor | None, backward: bool
    ) -> Tensor:
        """Compose as the API does, or as a faulty one."""
        if updates is None:
            return state
        assert transitions is not None
        self.count("composed")
        if self.fault == "raises":
            raise RuntimeError("unexpected rank of preceding_transition")
        for given in (updates, transitions):
            assert given.is_contiguous()
            assert given.dtype == state.dtype
        order = range(len(updates))
        if backward != (self.fault == "order"):
            order = order[::-1]
        for j in order:
            step = transitions[j]
            if backward != (self.fault == "transposed"):
                step = step.mT
            state = state @ step + updates[j]
        return state

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu: Tensor,
        safe_gate: bool,
        a_log: Tensor | None,
        dt_bias: Tensor | None,
        bound: float | None,
    ) -> None:
        """What every op checks, and what it assumes."""
        exact = (torch.float32, torch.float64)  # in place of 16 bits
        _decline(q.dtype not in exact or k.dtype != q.dtype or v.dtype != q.dtype, "dtypes")
        for name, x in (("g", g), ("beta", beta)):
            if x.dtype != (torch.float64 if q.dtype == torch.float64 else torch.float32):
                raise TypeError(f"{name} must be float32")
        if (a_log is not None or dt_bias is not None) and not safe_gate:
            raise ValueError("kimi_delta_attention: a_log/dt_bias require safe_gate=True")
        _decline(bound is not None and not safe_gate, "gate_lower_bound without safe_gate")
        for x in (q, k, v, g, beta):
            assert x.dim() in (2, 3)
            assert x.is_contiguous()
            assert not (x.requires_grad and torch.is_grad_enabled()), "autograd would record it"
        assert cu.dtype == torch.int32
        offsets = cu.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
        assert offsets[0] == 0
        assert offsets[-1] == len(q), "rows that no sequence covers"
        assert min(lengths) >= 2, f"a kernel was given sequences of {lengths} tokens"


#: Dispatch keys that calls from outside of any op leave out.
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def _own_graph() -> Iterator[None]:
    """A graph that the caller's hooks (activation checkpointing) do not see: kernels have none.

    Ops run below autograd, so it is let in again.
    """
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    included = torch._C._dispatch_tls_local_include_set()
    inside = torch._C._ForceDispatchKeyGuard(included, _EXCLUDED)
    with torch.enable_grad(), own, inside:
        yield


def _decline(when: bool, why: str) -> None:
    if when:
        raise cudnnGraphNotSupportedError(f"no engine proposed a plan for this graph: {why}")


def _check_states(state: Tensor, cu: Tensor, v: Tensor, g: Tensor) -> None:
    expected = (len(cu) - 1, v.shape[1], v.shape[2], g.shape[2])
    if tuple(state.shape) != expected:
        raise ValueError(f"states must be {expected}, got {tuple(state.shape)}")
    if state.dtype != g.dtype:
        raise TypeError("one state dtype per kernel")
    assert state.is_contiguous()


def _options(
    l2norm: bool,
    sigmoid: bool,
    negative: bool,
    safe_gate: bool,
    bound: float | None,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": l2norm,
        "use_beta_sigmoid_in_kernel": sigmoid,
        "allow_neg_eigval": negative,
    }
    if safe_gate:
        bound = -5.0 if bound is None else bound
        found.update(use_gate_in_kernel=True, lower_bound=bound, A_log=a_log, dt_bias=dt_bias)
    return found


def _run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, cu: Tensor, scale: float, state: Any, options: Any
) -> tuple[Tensor, Tensor]:
    """KDA on packed THD with V-major states, NaN where a chunk's gates leave the kernels' range."""
    o, final = naive_kda(
        q[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        cu_seqlens=cu.tolist(),
        scale=scale,
        initial_state=state,
        state_v_first=True,
        **options,
    )
    if not options.get("use_gate_in_kernel"):
        for start, stop in itertools.pairwise(cu.tolist()):
            for t in range(start, stop, 16):
                if bool((g[t : min(t + 16, stop)].sum(0) < -87).any()):
                    o, final = o * torch.nan, final * torch.nan
    return o[0], final


_numbers = itertools.count()
_libraries: list[Any] = []


def make(variant: str, *, fault: str = "", signature: bool = True, schema: bool = True) -> Fake:
    """Register a variant's ops under a namespace of its own.

    Args:
        variant: ``hopper``, ``blackwell`` or ``concatenated``.
        fault: of the concatenated API: ``order``, ``transposed`` or ``raises``.
        signature, schema: False leaves the concatenated arguments out of the one or the other.
    """
    concatenated = variant == "concatenated"
    fake = Fake(variant == "hopper", concatenated, fault)
    namespace = f"cpt_fake_cudnn_{next(_numbers)}"
    registered = torch.library.Library(namespace, "DEF")
    _libraries.append(registered)
    more = concatenated and schema
    for definition, function in (
        (FORWARD.format(more=_PRECEDING if more else ""), fake.forward),
        (BACKWARD.format(more=_FOLLOWING if more else ""), fake.backward),
        (SUMMARY, fake.summary),
        (SUMMARY_BACKWARD, fake.summary_backward),
    ):
        registered.define(definition)
        registered.impl(definition.partition("(")[0], function, "CPU")

    def plain(
        q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, scale: Any = None
    ) -> None:
        raise NotImplementedError

    def preceded(
        q: Any, k: Any, preceding_state_update: Any = None, preceding_transition: Any = None
    ) -> None:
        raise NotImplementedError

    public = preceded if concatenated and signature else plain
    module = SimpleNamespace(kimi_delta_attention=public)
    fake.library = library_of(module, getattr(torch.ops, namespace), "1.32.0", ("cpu",))
    return fake
