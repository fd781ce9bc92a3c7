# SPDX-License-Identifier: Apache-2.0
"""The triton engine among ranks: the op's oracle over the threads transport, in the interpreter."""

from __future__ import annotations

import pytest

from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import run_rank
from cptransport.transports import threads


@pytest.mark.parametrize("world_size", [3])
def test_packed_zigzag_with_losses_on_final_states(world_size: int) -> None:
    """A rank's last segment publishes dE = R^T dO + M^T dS, whatever segments stand before it."""
    spec = OpSpec(
        "kda",
        [0, 20, 21, 21, 60, 97],
        world_size=world_size,
        layout="zigzag",
        optional=("A_log", "dt_bias", "initial_state"),
        options={"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True},
        key_dim=16,
        value_dim=32,
        engine="triton",
        seed=3,
    )
    case = OpCase.of(spec)
    check(case, threads.run(lambda t: run_rank(t, case), world_size, timeout_s=120))
