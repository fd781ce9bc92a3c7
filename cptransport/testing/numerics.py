# SPDX-License-Identifier: Apache-2.0
"""Numeric comparison with fixed tolerances."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "RMS_TOLERANCES",
    "TOLERANCES",
    "assert_close",
    "relative_error",
    "relative_rms",
    "rms_tolerance",
]

#: Largest error over largest reference value, per tensor, by the dtype that was computed in.
# Nothing loosens these.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}

#: Largest relative RMS error of 16-bit streams against fp64, by what is compared.
RMS_TOLERANCES: dict[str, float] = {
    "output": 5e-3,
    "gradient": 8e-3,
    "dg": 2e-2,
    "dbeta": 2e-2,
}

#: A reference whose largest value is below this shows nothing.
SMALLEST_REFERENCE = 1e-4


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|, in fp64; an unmatched NaN counts as inf."""
    a, e = _wide(actual, expected)
    if a.numel() == 0:
        return 0.0
    same = (a == e) | (a.isnan() & e.isnan())  # equal infinities too
    difference = torch.where(same, torch.zeros_like(e), a - e).abs()
    worst = torch.where(difference.isnan(), torch.full_like(e, torch.inf), difference).max().item()
    finite = e[e.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return 0.0 if worst == 0 else worst / scale if scale else float("inf")


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return rms(actual - expected) / rms(expected), in fp64; NaN counts as inf.

    What the dtype of ``actual`` cannot represent so close to zero is no error.
    """
    a, e = _wide(actual, expected)
    if a.numel() == 0:
        return 0.0
    grid = torch.finfo(actual.dtype)
    nearest = grid.smallest_normal * grid.eps / 2
    difference = ((a - e).abs() - nearest).clamp(min=0).square().mean().sqrt().item()
    scale = e.square().mean().sqrt().item()
    if difference == 0:
        return 0.0
    return difference / scale if scale and difference == difference else float("inf")


def _wide(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in fp64 where the result is: large tensors on a GPU are compared there."""
    return actual.detach().double(), expected.detach().to(actual.device).double()


def rms_tolerance(name: str) -> float:
    """Return the limit of ``relative_rms`` for an output, or a gradient called ``d<input>``."""
    kind = "gradient" if name.startswith("d") else "output"
    return RMS_TOLERANCES.get(name, RMS_TOLERANCES[kind])


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype | None = None,
    name: str = "tensor",
    zero: bool = False,
) -> None:
    """Compare with the tolerance of a dtype, by largest error over largest reference value.

    Args:
        actual: the result.
        expected: the reference, of any float dtype (fp64 where possible); same shape.
        dtype: what was computed in; None: the dtype of ``actual``.
        name: for the message.
        zero: the reference is exactly zero, and the result must be. Without it, a reference too
            small to show anything is a failure of the test itself.

    Raises:
        AssertionError: they differ, or the comparison shows nothing.
    """
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if zero:
        assert not actual.count_nonzero(), (
            f"{name}: must be exactly zero, has {actual.abs().max().item():.3e}"
        )
        assert not expected.count_nonzero(), f"{name}: the reference is not zero"
        return
    if expected.numel() == 0:
        return
    largest = expected.detach().double().abs().nan_to_num().max().item()
    assert largest >= SMALLEST_REFERENCE, (
        f"{name}: the largest reference value is {largest:.3e}; that shows nothing"
    )
    limit = TOLERANCES[dtype or actual.dtype]
    error = relative_error(actual, expected)
    assert error <= limit, (
        f"{name}: relative error {error:.3e} above {limit:.0e} for {dtype or actual.dtype} "
        f"(largest reference value {largest:.3e})"
    )
