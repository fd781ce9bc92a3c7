# SPDX-License-Identifier: Apache-2.0
"""The ops token by token: the readable reference of everything else here.

Plain differentiable torch on the whole, unsharded stream, in the dtype of the inputs. Nothing is
shared with the chunked engines. Call these with float64 to judge other implementations.

All functions take the stream as the ops do: packed (``B = 1``, ``cu_seqlens`` with N + 1 offsets)
or dense (``B`` rows of one sequence; ``cu_seqlens`` may be omitted). ``padded_cu_seqlens`` says
where the sequences start in a padded stream; rows of no sequence count for nothing, whatever they
hold, and give zeros. States have one row per sequence: N when packed, B when dense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["naive_causal_conv1d", "naive_kda", "naive_mamba_split", "naive_ssd"]

Offsets = Sequence[int] | Tensor | None


def naive_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Offsets = None,
    padded_cu_seqlens: Offsets = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute Kimi Delta Attention.

    Per head, decay first, then the delta step::

        S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``; value head j reads query head ``j // (HV / H)``.
        g: ``[B, T, HV, K]``, natural-log decay in [-inf, 0], or the gate's input.
        beta: ``[B, T, HV]``.
        cu_seqlens: offsets of the sequences.
        padded_cu_seqlens: where they start in the padded stream, and its length.
        scale: of the output; None: ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``.
        use_qk_l2norm_in_kernel: normalise q and k per head.
        use_gate_in_kernel: compute the decay from g, ``A_log`` and ``dt_bias``.
        A_log: ``[HV]``; None: the gate's rate is 1.
        dt_bias: ``[HV, K]`` or ``[HV * K]``.
        safe_gate: says that the gate is bounded; changes nothing.
        lower_bound: the gate is ``lower_bound * sigmoid(rate * input)``.
        use_beta_sigmoid_in_kernel: apply a sigmoid to beta.
        allow_neg_eigval: and double it.
        state_v_first: states are ``[N, HV, V, K]``.

    Returns:
        o ``[B, T, HV, V]`` and the final states.
    """
    batch, _, heads, keys = q.shape
    value_heads, values = v.shape[2:]
    sequences = _sequences(v, cu_seqlens, padded_cu_seqlens)
    q, k, v, g, beta = (_without_padding(x, sequences) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    if use_gate_in_kernel:
        if dt_bias is not None:
            g = g + dt_bias.reshape(value_heads, keys)
        rate = g.new_ones(value_heads) if A_log is None else A_log.exp()
        if lower_bound is None:
            g = -rate[:, None] * functional.softplus(g)
        else:
            g = lower_bound * torch.sigmoid(rate[:, None] * g)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta)
        if allow_neg_eigval:
            beta = 2 * beta
    scale = keys**-0.5 if scale is None else scale
    q = q.repeat_interleave(value_heads // heads, dim=2)
    k = k.repeat_interleave(value_heads // heads, dim=2)

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = state * g.exp()[..., None]
        known = torch.einsum("bhk,bhkv->bhv", k, state)
        state = state + torch.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - known))
        return state, scale * torch.einsum("bhk,bhkv->bhv", q, state)

    if initial_state is not None and state_v_first:
        initial_state = initial_state.transpose(-1, -2)
    zero = v.new_zeros(batch, value_heads, keys, values)
    o, final = _scan(step, (q, k, v, g, beta), sequences, initial_state, zero, like=v)
    return o, final.transpose(-1, -2) if state_v_first else final


def naive_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    cu_seqlens: Offsets = None,
    padded_cu_seqlens: Offsets = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Compute Mamba2's state-space recurrence.

    Per head::

        d_t = clamp(softplus(dt_t + dt_bias))
        S_t = exp(A d_t) S_{t-1} + d_t x_t B_t^T
        y_t = (S_t C_t + D x_t) silu(z_t)

    Args:
        x: ``[B, T, nheads, headdim]``.
        dt: ``[B, T, nheads]``.
        A: ``[nheads]``.
        B: ``[B, T, ngroups, dstate]``; head j reads group ``j // (nheads / ngroups)``.
        C: likewise.
        cu_seqlens: offsets of the sequences.
        padded_cu_seqlens: where they start in the padded stream, and its length.
        D: ``[nheads]`` or ``[nheads, headdim]``.
        z: like x.
        dt_bias: ``[nheads]``.
        initial_states: ``[N, nheads, headdim, dstate]``.
        dt_softplus: apply softplus to dt.
        dt_limit: bounds of the step.

    Returns:
        y ``[B, T, nheads, headdim]`` and the final states.
    """
    sequences = _sequences(x, cu_seqlens, padded_cu_seqlens)
    x, dt, B, C = (_without_padding(rows, sequences) for rows in (x, dt, B, C))
    z = torch.ones_like(x) if z is None else functional.silu(_without_padding(z, sequences))
    D = torch.zeros_like(A) if D is None else D
    D = D.reshape(x.shape[2], -1)
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = functional.softplus(dt)
    d = dt.clamp(*dt_limit)
    # -inf, that forgets at every step but one of 0, has no product with 0.
    A = A.clamp(min=torch.finfo(A.dtype).min)
    B = B.repeat_interleave(x.shape[2] // B.shape[2], dim=2)
    C = C.repeat_interleave(x.shape[2] // C.shape[2], dim=2)

    def step(
        state: Tensor, x: Tensor, d: Tensor, B: Tensor, C: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = state * (A * d).exp()[..., None, None]
        state = state + torch.einsum("bh,bhp,bhn->bhpn", d, x, B)
        return state, (torch.einsum("bhpn,bhn->bhp", state, C) + D * x) * gate

    zero = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3])
    return _scan(step, (x, d, B, C, z), sequences, initial_states, zero, like=x)


def naive_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Offsets = None,
    padded_cu_seqlens: Offsets = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a depthwise causal convolution.

    Args:
        x: ``[B, T, D]``.
        weight: ``[D, W]``; the last column meets the current token.
        bias: ``[D]``.
        cu_seqlens: offsets of the sequences.
        padded_cu_seqlens: where they start in the padded stream, and its length.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: like x, added last.
        initial_state: ``[N, D, W - 1]``, the inputs before each sequence, oldest first.

    Returns:
        y ``[B, T, D]`` and the final states: the last ``W - 1`` inputs of each sequence.
    """
    sequences = _sequences(x, cu_seqlens, padded_cu_seqlens)
    x = _without_padding(x, sequences)

    def step(window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((window, x[..., None]), -1)
        y = (window * weight).sum(-1)
        if bias is not None:
            y = y + bias
        if activation is not None:
            y = functional.silu(y)
        return window[..., 1:], y

    channels, width = weight.shape
    zero = x.new_zeros(x.shape[0], channels, width - 1)
    y, final = _scan(step, (x,), sequences, initial_state, zero, like=x)
    if residual is not None:
        y = y + _without_padding(residual, sequences)
    return y, final


def naive_mamba_split(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    *,
    headdim: int,
    ngroups: int,
    cu_seqlens: Offsets = None,
    padded_cu_seqlens: Offsets = None,
    activation: str | None = "silu",
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    stored_as: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the core of a Mamba2 mixer: split, convolution, recurrence, gate.

    Args:
        zxbcdt: ``[B, T, 2 * nheads * headdim + 2 * ngroups * dstate + nheads]``: z, x, B, C, dt.
        conv1d_weight: ``[nheads * headdim + 2 * ngroups * dstate, W]``, over x, B, C.
        conv1d_bias: one per channel.
        dt_bias: ``[nheads]``.
        A: ``[nheads]``.
        D: ``[nheads]`` or ``[nheads, headdim]``.
        headdim: channels of a head.
        ngroups: groups of B and C.
        cu_seqlens: offsets of the sequences.
        padded_cu_seqlens: where they start in the padded stream, and its length.
        activation: of the convolution.
        initial_states: ``[N, nheads, headdim, dstate]``.
        dt_limit: bounds of the step.
        stored_as: round the convolution's output to this dtype, as an op that stores it there does;
            its gradient passes unchanged.

    Returns:
        y ``[B, T, nheads * headdim]``, gated by silu(z), and the final states.
    """
    nheads = A.shape[0]
    inner = nheads * headdim
    shared = (conv1d_weight.shape[0] - inner) // 2
    z, xBC, dt = torch.split(zxbcdt, [inner, inner + 2 * shared, nheads], -1)
    xBC, _ = naive_causal_conv1d(
        xBC,
        conv1d_weight,
        conv1d_bias,
        cu_seqlens=cu_seqlens,
        padded_cu_seqlens=padded_cu_seqlens,
        activation=activation,
    )
    if stored_as is not None:
        xBC = xBC + (xBC.to(stored_as).to(xBC.dtype) - xBC).detach()
    x, B, C = torch.split(xBC, [inner, shared, shared], -1)
    y, final = naive_ssd(
        _by_head(x, nheads),
        dt,
        A,
        _by_head(B, ngroups),
        _by_head(C, ngroups),
        cu_seqlens=cu_seqlens,
        padded_cu_seqlens=padded_cu_seqlens,
        D=D,
        z=_by_head(z, nheads),
        dt_bias=dt_bias,
        initial_states=initial_states,
        dt_softplus=True,
        dt_limit=dt_limit,
    )
    return y.flatten(-2), final


def _sequences(x: Tensor, cu_seqlens: Offsets, padded_cu_seqlens: Offsets) -> list[tuple[int, int]]:
    """Return the rows (start, stop) of each sequence."""
    offsets = [0, x.shape[1]] if cu_seqlens is None else [int(row) for row in cu_seqlens]
    starts = offsets if padded_cu_seqlens is None else [int(row) for row in padded_cu_seqlens]
    if starts[-1] != x.shape[1]:
        raise ValueError(f"the offsets end at {starts[-1]}, the stream at {x.shape[1]}")
    if x.shape[0] > 1 and len(offsets) != 2:
        raise ValueError("several sequences need a packed stream, B = 1")
    lengths = [last - first for first, last in zip(offsets, offsets[1:], strict=False)]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _without_padding(x: Tensor, sequences: list[tuple[int, int]]) -> Tensor:
    """Return x with zeros in the rows of no sequence; those get zero gradients."""
    real = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    for start, stop in sequences:
        real[start:stop] = True
    return torch.where(real.view(-1, *(1,) * (x.ndim - 2)), x, 0.0)


def _scan(
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: tuple[Tensor, ...],
    sequences: list[tuple[int, int]],
    initial: Tensor | None,
    zero: Tensor,
    *,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run ``step`` over the tokens of each sequence.

    Args:
        step: maps a state and a token's inputs to the next state and the token's output, both
            ``[B, ...]``.
        tokens: the inputs, ``[B, T, ...]``.
        sequences: rows of each sequence.
        initial: a state per sequence (packed) or per batch row (dense); None: zeros.
        zero: the state ``[B, ...]`` before a sequence without an initial state.
        like: has the output's shape and dtype, ``[B, T, ...]``.

    Returns:
        The output, zero in rows of no sequence, and the final states.
    """
    batch = len(zero)
    rows = list(zip(*(x.unbind(1) for x in tokens), strict=True))
    outputs = list(torch.zeros_like(like).unbind(1))
    finals = [zero[:0]]
    for n, (start, stop) in enumerate(sequences):
        state = zero if initial is None else initial[n * batch : (n + 1) * batch]
        for row in range(start, stop):
            state, outputs[row] = step(state, *rows[row])
        finals.append(state)
    output = torch.stack(outputs, 1) if outputs else torch.zeros_like(like)
    return output, torch.cat(finals)
