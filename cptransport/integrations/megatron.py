# SPDX-License-Identifier: Apache-2.0
"""Megatron's options for sequence-sharded Mamba2, mapped onto ours.

Nothing of Megatron is imported. Its context parallelism hands every mixer a balanced shard (zigzag,
inside every document where data is packed), ``[s, b, h]``; ``examples/mamba_mixer_megatron.py`` is a
mixer on such shards.

Without ``--use-mamba-state-passing-cp`` the answer is ``all_to_all``, the path that Megatron takes
by default.

Source: names and meanings as in the pull request "Mamba2 state-passing context parallelism" to
Megatron-LM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import Tensor

from cptransport.errors import OpInputError
from cptransport.plan import Plan, build_plan

__all__ = ["MODES", "add_arguments", "balanced_plan", "load_balancing"]

#: What ``--mamba-state-passing-cp-load-balancing`` takes.
MODES = ("none", "permute_p2p", "permute_a2a", "virtual")

_USE = "--use-mamba-state-passing-cp"
_MODE = "--mamba-state-passing-cp-load-balancing"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the two options; fit to be Megatron's ``extra_args_provider``.

    Args:
        parser: a Megatron that has an option already keeps its own.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("Mamba2 state-passing context parallelism")
    _add(
        group,
        _USE,
        action="store_true",
        help="shard Mamba2 by sequence and pass states between ranks, in place of redistributing heads",
    )
    _add(
        group,
        _MODE,
        choices=MODES,
        default="virtual",
        help="what to do about balanced shards: compute them in place (virtual), move activations to "
        "contiguous shards and back (permute_p2p, permute_a2a), or nothing, for shards that are "
        "contiguous already (none)",
    )
    return parser


def _add(group: argparse._ArgumentGroup, option: str, **settings: object) -> None:
    try:
        group.add_argument(option, **settings)  # type: ignore[arg-type]
    except argparse.ArgumentError as error:
        if "conflicting option" not in str(error):
            raise


def load_balancing(args: argparse.Namespace, *, layout: str = "zigzag") -> str:
    """Return the ``load_balancing`` of ``mamba_split_conv1d_scan_combined`` that options ask for.

    Args:
        args: parsed; options that are absent count as not given.
        layout: of the shards that the mixer receives, a name of ours; Megatron's are balanced.

    Raises:
        OpInputError (a ValueError): ``none`` with shards that are not contiguous, or no such mode.
    """
    if not getattr(args, "use_mamba_state_passing_cp", False):
        return "all_to_all"
    mode = getattr(args, "mamba_state_passing_cp_load_balancing", "virtual")
    if mode not in MODES:
        raise OpInputError(f"{_MODE} {mode!r} is not valid; choose one of {', '.join(MODES)}")
    if mode == "none" and layout != "contiguous":
        raise OpInputError(
            f"{_MODE} none expects contiguous shards and this mixer receives {layout} ones; "
            "use virtual"
        )
    return str(mode)


def balanced_plan(
    cu_seqlens: Sequence[int] | Tensor,
    cp_size: int,
    *,
    cu_seqlens_padded: Sequence[int] | Tensor | None = None,
) -> Plan:
    """Return the plan of Megatron's shards: front and back pieces inside every document.

    Args:
        cu_seqlens: offsets of the documents of a packed batch (``PackedSeqParams.cu_seqlens_q``), or
            ``[0, sequence length]``.
        cp_size: number of context-parallel ranks.
        cu_seqlens_padded: where documents start in the padded buffer
            (``PackedSeqParams.cu_seqlens_q_padded``).

    Raises:
        PlanError: as ``build_plan``.
    """
    return build_plan(
        cu_seqlens,
        world_size=cp_size,
        layout="zigzag_per_sequence",
        padded_cu_seqlens=cu_seqlens_padded,
    )
