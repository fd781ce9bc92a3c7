# SPDX-License-Identifier: Apache-2.0
"""How cuDNN's KDA is called for one kind of call on this GPU, found once, before the first step.

Which options, dtypes and sizes cuDNN serves depends on GPU and direction; on Hopper several are
served forward and fail only in the backward. So nothing is believed: ``resolve`` runs every op that
a way of calling needs, forward and backward, on a few tokens. The ways, best first:

1. all options inside cuDNN that it has a name for (Blackwell);
2. the plain recurrence, all options applied outside (Hopper);
3. the same with query heads copied, for HV > H (Hopper).

How the summary of an interior segment is made, best first:

* ``summary``: cuDNN's summary ops (Blackwell);
* ``triton``: the ``triton`` engine's forward, which gives E, M, outputs and effective queries in one
  pass whatever the gates; cuDNN computes the backward;
* ``identity``: cuDNN's forward from the identity without values: its final state is M, its output
  the effective query R. On an H200 faster for strong gates (a mean of -1), 2.4 times slower for weak
  ones (-0.25), where cuDNN's forward walks back to the start of the segment.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cptransport.engines import OpFacts
from cptransport.errors import BackendUnavailableError
from cptransport_cudnn_summary import library
from cptransport_cudnn_summary.activation import Outside, Tokens
from cptransport_cudnn_summary.concat import Stack, fault
from cptransport_cudnn_summary.contract import Contract, Kind

__all__ = ["insist", "resolve"]

_trying = threading.RLock()
#: Offsets of the sequences of a trial run: no multiple of a chunk, more than one chunk.
_TRIAL = (0, 40, 67)


def resolve(kind: Kind) -> Contract | str:
    """Return how calls of a kind are made, or why cuDNN does not serve them.

    Raises:
        EnvVarError: one of the variables has no valid value.

    Stream: runs trials the first time, and waits for them.
    """
    interior = library.setting("CULA_CP_CUDNN_INTERIOR")
    concat = library.setting("CULA_CP_CUDNN_CONCAT")
    try:
        found = library.find()
    except BackendUnavailableError as error:
        return str(error)
    with _trying:  # ranks may be threads
        return _resolve(kind, found, interior, concat)


def insist(contract: Contract) -> None:
    """Raise BackendUnavailableError where ``CULA_CP_CUDNN_CONCAT=require`` and the API is absent or wrong."""
    if contract.binding is None and library.setting("CULA_CP_CUDNN_CONCAT") == "require":
        raise BackendUnavailableError(f"CULA_CP_CUDNN_CONCAT=require, but {contract.notes[-1]}")


@lru_cache(maxsize=256)
def _resolve(kind: Kind, found: library.Library, interior: str, concat: str) -> Contract | str:
    if kind.device.type not in found.device_types:
        return f"needs {' or '.join(found.device_types)} tensors, not {kind.device.type}"
    refused: list[str] = []
    for way in _ways(kind, found):
        trial = _Trial(kind, way)
        fault_ = trial.failure(trial.plain)
        if fault_ is None:
            return _finished(trial, interior, concat)
        if fault_ not in refused:
            refused.append(fault_)
    return f"cuDNN frontend {found.version} does not serve this here: {refused[-1]}"


def _ways(kind: Kind, found: library.Library) -> list[Contract]:
    options, default = kind.options, kind.key_dim**-0.5
    bounded = options.use_gate_in_kernel and options.lower_bound is not None
    inside: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": options.use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": options.use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": options.allow_neg_eigval,
    }
    if bounded:
        inside.update(safe_gate=True, gate_lower_bound=options.lower_bound)
    fused = Outside(False, options.use_gate_in_kernel and not bounded, False, False, 1.0)
    # cuDNN's backward on Hopper knows one scale; any other is a factor of q.
    copied = Outside.everything(options, options.scale / default)
    ways = [Contract(found, fused, inside, options.scale)]
    if options.allow_neg_eigval:
        # Outside it would give beta up to 2 to kernels that, on Hopper, drop old state by a bound
        # that needs beta below 1. Where cuDNN serves the option it knows what it does.
        return ways
    ways.append(Contract(found, replace(copied, heads=False), {}, default))
    if kind.value_heads != kind.heads:
        ways.append(Contract(found, copied, {}, default))
    return ways


def _finished(trial: _Trial, interior: str, concat: str) -> Contract | str:
    """Choose how interior segments are summarised, and whether cuDNN composes."""
    way, kind = trial.way, trial.kind
    reasons: dict[str, str | None] = {
        "summary": trial.failure(trial.summaries),
        "triton": _triton_declines(kind),
        "identity": trial.failure(trial.identity),
    }
    names = list(reasons) if interior == "auto" else [interior, *reasons]
    chosen = next((name for name in names if reasons[name] is None), "")
    if not chosen:
        return "nothing summarises interior segments: " + "; ".join(
            f"{name}: {why}" for name, why in reasons.items()
        )
    notes = [
        f"cuDNN frontend {way.library.version}",
        f"interior segments by {chosen}",
        *(f"not by {name}: {why}" for name, why in reasons.items() if why and name == interior),
    ]
    way = replace(way, interior=chosen)
    binding = way.library.binding
    if binding is None or concat == "off" or chosen != "summary":
        why = way.library.absent or "off" if concat != "off" else "off"
        if binding is not None and concat != "off":
            why = f"interior segments are summarised by {chosen}"
        notes.append(f"summaries composed outside cuDNN; concatenated-summary API: {why}")
        return replace(way, notes=tuple(notes))
    native = replace(way, binding=binding)
    wrong = _Trial(kind, native).concatenated()
    if wrong is not None:
        notes.append(f"summaries composed outside cuDNN; concatenated-summary API refused: {wrong}")
        return replace(way, notes=tuple(notes))
    notes.append(f"summaries that are gathered are composed inside cuDNN ({binding})")
    return replace(native, notes=tuple(notes))


def _triton_declines(kind: Kind) -> str | None:
    names = ["q", "k", "v", *(n for n in ("A_log", "dt_bias") if getattr(kind, n.lower()))]
    facts = OpFacts(
        op="kda",
        device_type=kind.device.type,
        world_size=1,
        batch=1,
        heads=kind.heads,
        value_heads=kind.value_heads,
        key_dim=kind.key_dim,
        value_dim=kind.value_dim,
        dtypes=dict.fromkeys(names, kind.io),
        state_dtype=kind.state,
        max_segments=1,
        max_tokens=1,
        requires_grad=frozenset(),
        options=kind.options,
    )
    if kind.state == torch.float64:
        return "the triton engine has no float64"
    try:
        from cptransport.engines.triton import KDA_ENGINE
    except ImportError as error:
        return f"the triton engine needs {error.name}"
    return KDA_ENGINE.eligible(facts)


class _Trial:
    """Runs of a way of calling on a few tokens."""

    def __init__(self, kind: Kind, way: Contract) -> None:
        self.kind, self.way = kind, way
        heads = kind.value_heads if way.outside.heads else kind.heads
        tokens, generator = _TRIAL[-1], torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def unit(*shape: int) -> Tensor:
            return torch.nn.functional.normalize(normal(*shape), dim=-1)

        inside = bool(way.flags.get("safe_gate"))
        made: dict[str, Tensor] = {
            "q": unit(tokens, heads, kind.key_dim),
            "k": unit(tokens, heads, kind.key_dim),
            "v": normal(tokens, kind.value_heads, kind.value_dim),
            "g": -normal(tokens, kind.value_heads, kind.key_dim).abs() / 16,
            "beta": normal(tokens, kind.value_heads).sigmoid(),
        }
        if inside and kind.a_log:
            made["a_log"] = normal(kind.value_heads) / 4
        if inside and kind.dt_bias:
            made["dt_bias"] = normal(kind.value_heads, kind.key_dim)
        self.tokens = Tokens(
            **{
                name: x.to(kind.device, kind.io if name in ("q", "k", "v") else kind.state)
                for name, x in made.items()
            }
        )
        self.cu_seqlens = torch.tensor(_TRIAL, dtype=torch.int32, device=kind.device)
        shape = (len(_TRIAL) - 1, kind.value_heads, kind.value_dim, kind.key_dim)
        self.states = normal(*shape).to(kind.device, kind.state)
        self.do = normal(*self.tokens.v.shape).to(kind.device, kind.io)

    def failure(self, run: Callable[[], list[Tensor]]) -> str | None:
        """Return why a trial failed: what was raised, or results that are not finite."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = run()
            finite = all(bool(x.isfinite().all()) for x in found)
        except Exception as error:  # whatever an op of cuDNN's may raise
            return f"{type(error).__name__}: {error}"
        return None if finite else "results that are not finite"

    def plain(self) -> list[Tensor]:
        """Both directions."""
        t, cu = self.tokens, self.cu_seqlens
        o, final = self.way.forward(t, cu, self.states)
        grads, d_initial = self.way.backward(self.do, t, cu, self.states, self.states)
        return [o, final, d_initial, *(grad for grad in grads if grad is not None)]

    def summaries(self) -> list[Tensor]:
        """cuDNN's summary ops."""
        if self.way.library.summary is None or self.way.library.summary_backward is None:
            raise NotImplementedError("this version has no summary ops")
        return [
            *self.way.summary(self.tokens, self.cu_seqlens),
            self.way.summary_backward(self.do, self.tokens, self.cu_seqlens),
        ]

    def identity(self) -> list[Tensor]:
        """The forward from the identity."""
        return list(self.way.identity(self.tokens, self.cu_seqlens))

    def concatenated(self) -> str | None:
        """Why the concatenated-summary API is not used, if it is not."""
        t, cu = self.tokens, self.cu_seqlens

        def forward(initial: Tensor, stack: Stack | None) -> tuple[Tensor, ...]:
            return self.way.forward(t, cu, initial, stack)

        def backward(initial: Tensor, d_final: Tensor, stack: Stack | None) -> tuple[Tensor, ...]:
            grads, d_initial = self.way.backward(self.do, t, cu, initial, d_final, stack)
            return (*grads[:5], d_initial)

        shape = tuple(self.states.shape)
        with torch.no_grad():
            return fault(forward, backward, shape, self.states)  # type: ignore[arg-type]
