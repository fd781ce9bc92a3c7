# SPDX-License-Identifier: Apache-2.0
"""Cases of a ``RankPool`` on threads of this process."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import traceback

import torch

from cptransport.testing.ranks import Answer, Order, Ranks, load_case, run_case
from cptransport.transports import threads

__all__ = ["run_threads"]


def run_threads(
    order: Order, world_size: int, device: str, timeout_s: float
) -> tuple[list[Answer | None], str]:
    """Run a case with its ranks as threads.

    Args:
        order: the case.
        world_size: ranks.
        device: ``"cpu"``, or ``"cuda"`` with a device per rank.
        timeout_s: the watchdog; threads that hang are left behind.

    Returns:
        The answers by rank (None: none came) and, after a hang, the stacks of all threads.
    """
    fn = load_case(order.case)
    answers: list[Answer | None] = [None] * world_size
    store = torch.distributed.HashStore()  # type: ignore[attr-defined,unused-ignore]
    torch.manual_seed(order.number)

    def rank_main(transport: threads.ThreadTransport) -> None:
        ranks = Ranks(
            transport.rank,
            world_size,
            order.backend,
            transport.device,
            order.timeout_s,
            processes=False,
            store=store,
        )
        try:
            answer = Answer(run_case(ranks, fn, order.kwargs, transport=order.transport))
        except BaseException:
            answer = Answer(failure=traceback.format_exc())
        answers[ranks.rank] = answer

    def main() -> None:
        try:
            threads.run(rank_main, world_size, order.timeout_s, device=device)
        except BaseException:  # before any rank started, else the ranks have answered
            failure = Answer(failure=traceback.format_exc())
            answers[:] = [answer or failure for answer in answers]

    everything = threading.Thread(target=main, name="cpt-pool", daemon=True)
    everything.start()
    everything.join(timeout_s)
    return answers, _stacks() if everything.is_alive() else ""


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as stream:
        faulthandler.dump_traceback(stream, all_threads=True)
        stream.seek(0)
        return stream.read()
