# SPDX-License-Identifier: Apache-2.0
"""From checked inputs to an ``OpCall``: settings, engine, wire, record. Shared by KDA and SSD."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cptransport import env
from cptransport.context import CPContext
from cptransport.cost import Choice, choose, costs_of, predict
from cptransport.engine_registry import engine_variables
from cptransport.engines import KDAOptions, OpFacts, SSDOptions
from cptransport.exchange import Wire
from cptransport.ops.call import OpCall
from cptransport.ops.engine_choice import choose_engine
from cptransport.ops.inputs import describe_call
from cptransport.ops.scope import RunRecord, record_run
from cptransport.transport import PartSpec

__all__ = ["make_call", "recall"]


class _Recorded(Protocol):
    @property
    def record(self) -> RunRecord: ...


_Call = TypeVar("_Call", bound=_Recorded)

#: Variables, beside ``CULA_CP_CHECK`` and those of engines, that a call depends on.
_READ = tuple(variable.name for variable in (env.ENGINE, env.COMPOSITION, env.OVERLAP))
#: Signatures that one context remembers.
_REMEMBERED = 256


def recall(
    context: CPContext,
    title: str,
    tensors: Sequence[Tensor | None],
    settings: tuple[Hashable, ...],
    make: Callable[[], tuple[_Call, str]],
) -> tuple[_Call, str]:
    """Return what ``make`` once returned for a call of the same signature, else call it.

    A call depends on its tensors by shape, dtype, device and whether they require gradients. What
    raises is not remembered.

    Args:
        context: which remembers.
        title: public name of the op.
        tensors: all that were given; None for those that were not.
        settings: all else that the call depends on, but the environment and the transport; 16.0 and
            16 are two settings.
        make: checks the call and says what must be the same on every rank; see ``make_call``.
    """
    transport = context.transport
    found: tuple[_Call, str] | None
    try:
        key = (
            title,
            settings,
            *map(type, settings),
            torch.is_grad_enabled(),
            getattr(transport, "strict", False),
            getattr(transport, "preferred_engine", None),
            *map(os.environ.get, (*_READ, *engine_variables())),
            *[
                None if t is None else (t.shape, t.dtype, t.device, t.requires_grad)
                for t in tensors
            ],
        )
        found = context.calls.get(key)
    except (AttributeError, TypeError):  # no tensor, or no setting: what checks it says so
        return make()
    if found is None:
        found = make()
        if len(context.calls) >= _REMEMBERED:
            context.calls.clear()
        context.calls[key] = found
    record_run(found[0].record)
    return found


def make_call(
    title: str,
    op: str,
    context: CPContext,
    tensors: Mapping[str, Tensor | None],
    initial_state: Tensor | None,
    build: Callable[[Sequence[Any], Tensor | None], Any],
    options: KDAOptions | SSDOptions,
    *,
    sizes: tuple[int, int, int, int, int],
    state_shape: tuple[int, ...],
    state_dtype: torch.dtype,
    user_layout: str,
    engine: str | None,
    flat: Mapping[str, tuple[int, ...]] | None = None,
    final: bool = True,
) -> tuple[OpCall, str]:
    """Choose engine and composition for a call.

    Args:
        title: public name of the op. op: ``"kda"`` or ``"ssd"``.
        context: plan and transport.
        tensors: inputs by name, in the order ``build`` takes them.
        initial_state: as given.
        build: makes the engine's inputs.
        options: of the op.
        sizes: B, heads, value heads, key dim, value dim.
        state_shape: ``[N, ...]`` in the caller's layout.
        state_dtype: of states.
        user_layout: ``"k_major"`` or ``"v_major"``.
        engine: the op's argument.
        flat, final: see ``OpCall``.

    Returns:
        The call, and the text that must be the same on every rank.

    Raises:
        As ``choose_engine``; EnvVarError.
    """
    plan, transport = context.plan, context.transport
    batch, heads, value_heads, key_dim, value_dim = sizes
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    given = {
        name: t for name, t in (*tensors.items(), ("initial_state", initial_state)) if t is not None
    }
    tracked = torch.is_grad_enabled()
    facts = OpFacts(
        op=op,
        device_type=device.type,
        world_size=plan.world_size,
        batch=batch,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtypes={name: tensor.dtype for name, tensor in given.items()},
        state_dtype=state_dtype,
        max_segments=plan.max_segments,
        max_tokens=plan.max_tokens,
        requires_grad=frozenset(n for n, t in given.items() if tracked and t.requires_grad),
        options=options,
    )
    chosen, reasons = choose_engine(facts, transport, engine)
    parts = chosen.slot_parts(facts)
    choice = _compose(context, parts)
    overlap = env.flag(env.OVERLAP)
    layout = getattr(chosen, "state_layout", "k_major")
    record = RunRecord(
        title,
        chosen.name,
        transport.name,
        choice.composition,
        overlap,
        plan.world_size,
        (*reasons, *choice.passed_over),
        choice.predicted_s,
        chosen.detail(facts) if hasattr(chosen, "detail") else "",
    )
    call = OpCall(
        title=title,
        names=tuple(tensors),
        build=build,
        engine=chosen,
        facts=facts,
        context=context,
        wire=Wire(op, parts, layout, batch, device, choice.composition),
        overlap=overlap,
        state_shape=state_shape,
        swap=layout != user_layout,
        initial_dtype=None if initial_state is None else initial_state.dtype,
        flat=flat or {},
        record=record,
        final=final,
    )
    record_run(record)
    return call, describe_call(facts, plan.digest(), chosen.name, choice.composition, overlap)


def _compose(context: CPContext, parts: tuple[PartSpec, ...]) -> Choice:
    """The composition that was asked for, or the cheapest; the same on every rank."""
    plan, transport = context.plan, context.transport
    asked = env.choice(env.COMPOSITION)
    if asked == "auto":
        return choose(plan, parts, transport.name, transport.capabilities.pairwise)
    return Choice(asked, predict(plan, parts, asked, costs_of(transport.name)))
