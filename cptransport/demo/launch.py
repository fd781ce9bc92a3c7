# SPDX-License-Identifier: Apache-2.0
"""Ranks of the demo, as processes that meet through a file or as threads of this process.

Whatever ends a run early (a rank's error or death, Ctrl-C here) ends all of its ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport import env
from cptransport.backend import TransportBase
from cptransport.demo.train import Outcome, RankResult, Settings, Step, train_rank
from cptransport.errors import BackendUnavailableError, CPTransportError, PeerFailedError
from cptransport.select import create_transport
from cptransport.transports import threads

__all__ = ["RankError", "run_demo"]

_LATE_S = 2.0  # after the first error, for the rank whose error it really is
_TERMINATE_S = 5.0  # between SIGTERM and SIGKILL


class RankError(CPTransportError):
    """A rank of the demo raised or ended; its traceback is in the context."""


class _TracebackError(Exception):
    """The traceback of a rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_demo(settings: Settings, on_step: Callable[[Step], None]) -> Outcome:
    """Train, comparing every step with the unsharded run.

    Args:
        settings: what and where.
        on_step: called after every step, in this process.

    Raises:
        RankError: a rank failed; one line, with the rank's own words.
        EnvVarError: a variable is not valid.
        BackendUnavailableError: CUDA was asked for and torch sees none.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("torch sees no CUDA device")
    steps: list[Step] = []

    def record(step: Step) -> None:
        steps.append(step)
        on_step(step)

    backend, _ = env.text(env.COMM_BACKEND, settings.backend)
    run = _run_threads if backend == "threads" else _run_processes
    results = run(settings, record)
    return Outcome(settings, tuple(steps), tuple(results))


# ---------------------------------------------------------------------------------------------------- threads


class _Sum:
    """Sums over ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._tensors: list[Tensor | None] = [None] * ranks

    def add_up(self, rank: int, tensor: Tensor) -> Tensor:
        """Return the sum in rank order, in a tensor of this rank's own."""
        self._tensors[rank] = tensor
        self._meet()
        total = torch.zeros_like(tensor)
        for each in self._tensors:
            assert each is not None
            total += each.to(tensor.device)
        self._meet()  # nobody replaces a tensor that a slower rank still reads
        return total

    def abort(self) -> None:
        """Send away the ranks that wait."""
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerFailedError("another rank failed") from error


def _run_threads(settings: Settings, on_step: Callable[[Step], None]) -> list[RankResult]:
    total, stopped, finished = _Sum(settings.ranks), threading.Event(), threading.Event()
    results: list[RankResult] = []
    failures: list[BaseException] = []

    def check_and_add(rank: int, tensor: Tensor) -> Tensor:
        if stopped.is_set():
            raise PeerFailedError("interrupted")
        return total.add_up(rank, tensor)

    def one_rank(transport: threads.ThreadTransport) -> RankResult:
        try:
            return train_rank(
                transport, settings, lambda tensor: check_and_add(transport.rank, tensor), on_step
            )
        except BaseException as error:
            total.abort()
            if not isinstance(error, PeerFailedError):
                failure = RankError(f"rank {transport.rank} {_line(error)}")
                failure.__context__ = error
                failures.append(failure)
            raise

    def all_ranks() -> None:
        try:
            results.extend(threads.run(one_rank, settings.ranks, device=settings.device))
        except BaseException as error:
            failures.append(error)
        finally:
            finished.set()

    intra_op = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks share the cores
    try:
        # A thread of its own, so that Ctrl-C reaches this one while the ranks compute; an event,
        # since a join that was interrupted takes the thread for ended.
        threading.Thread(target=all_ranks, name="cpt-demo", daemon=True).start()
        finished.wait()
    finally:
        stopped.set()
        finished.wait()
        torch.set_num_threads(intra_op)
    if failures:
        raise failures[0]
    return results


# -------------------------------------------------------------------------------------------------- processes


def _run_processes(settings: Settings, on_step: Callable[[Step], None]) -> list[RankResult]:
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="cpt-demo-") as directory:
        try:
            for rank in range(settings.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_process,
                    args=(theirs, settings, rank, str(Path(directory, "store"))),
                    name=f"cpt-demo-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            return _collect(processes, connections, on_step)
        finally:
            _end(processes)
            for connection in connections:
                connection.close()


def _collect(
    processes: list[BaseProcess], connections: list[Connection], on_step: Callable[[Step], None]
) -> list[RankResult]:
    """Take steps and results as they come; raise the error of the rank that failed itself."""
    results: dict[int, RankResult] = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    failures: list[tuple[bool, RankError]] = []  # (own, not only heard of), in order of arrival
    deadline: float | None = None
    while waiting and not any(own for own, _ in failures):
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), limit)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            message = _receive(connection, processes[rank])
            if isinstance(message, Step):
                on_step(message)
                continue
            del waiting[connection]
            if isinstance(message, RankResult):
                results[rank] = message
                continue
            own, line, trace = message
            error = RankError(f"rank {rank} {line}")
            # The context, not the cause: a traceback is no part of the one line that says why.
            error.__context__ = _TracebackError(trace) if trace else None
            failures.append((own, error))
            deadline = deadline or time.monotonic() + _LATE_S
    if failures:
        raise next((error for own, error in failures if own), failures[0][1])
    for process in processes:
        process.join(_TERMINATE_S)
    return [results[rank] for rank in range(len(connections))]


def _receive(connection: Connection, process: BaseProcess) -> Any:
    """Return a rank's next message; when it is gone, what it left unsaid."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        process.join(_TERMINATE_S)
        return True, f"ended with exit code {process.exitcode}", ""


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs: SIGTERM, then SIGKILL."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        running = [process for process in processes if process.is_alive()]
        for process in running:
            stop(process)
        deadline = time.monotonic() + _TERMINATE_S
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))


def _rank_process(connection: Connection, settings: Settings, rank: int, store: str) -> None:
    """Run one rank and send its steps, then its result or ``(own error, line, traceback)``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)  # ranks share the cores
        connection.send(_process_rank(connection, settings, rank, store))
    except BaseException as error:
        own = not isinstance(error, PeerFailedError)
        with contextlib.suppress(OSError):  # the parent has gone
            connection.send((own, _line(error), traceback.format_exc()))


def _process_rank(connection: Connection, settings: Settings, rank: int, store: str) -> RankResult:
    device, groups = torch.device(settings.device), "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        groups = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        groups,
        store=dist.FileStore(store, settings.ranks),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=env.timeout_s()),
    )

    def add_up(tensor: Tensor) -> Tensor:
        total = tensor.cpu()
        try:
            dist.all_reduce(total)
        except RuntimeError as error:  # gloo's word for a peer that has gone
            raise PeerFailedError(f"the sum over ranks failed: {error}") from error
        return total.to(tensor.device)

    transport: Any = create_transport(backend=settings.backend, device=device)
    if not isinstance(transport, TransportBase):
        transport = contextlib.closing(transport)
    with transport as opened:
        result = train_rank(opened, settings, add_up, connection.send)
    dist.destroy_process_group()
    return result


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _line(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
