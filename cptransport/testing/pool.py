# SPDX-License-Identifier: Apache-2.0
"""``RankPool``: ranks that stay alive between test cases, and a watchdog that no hang survives.

Ranks are processes, each in a session of its own; orders and results travel on a pipe per rank,
never through a collective; they meet through a FileStore in a temporary directory, so no port is
ever taken. After any failure the pool drops its ranks and the next case gets fresh ones. The
backend ``threads`` runs the same cases as threads of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from cptransport.testing.ranks import Answer, Order, case_path
from cptransport.testing.thread_ranks import run_threads

__all__ = ["CaseError", "RankPool", "close_pools", "pool", "run_ranks"]

#: Watchdog of a case and limit of its transports' waits, in seconds.
CASE_TIMEOUT_S = 60.0
TRANSPORT_TIMEOUT_S = 20.0

_START_TIMEOUT_S = 120.0
_STACKS_S = 1.0  # how long ranks get to write their stacks
_TERMINATE_S = 5.0  # between SIGTERM and SIGKILL
_TAIL_LINES = 40


class CaseError(AssertionError):
    """A case failed on some rank; the message says how it went on every rank.

    Attributes:
        failures: rank -> text, for the ranks that failed.
    """

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class RankPool:
    """Persistent ranks of one backend.

    Args:
        backend: a backend's name or ``module:ATTR``; ``"threads"`` means threads of this process.
        world_size: ranks.
        ranks_per_device: with CUDA, how many ranks share a device (for backends with
            ``shared_device``).
        processes: None: by backend. False runs a ``module:ATTR`` backend's ranks as threads.
        device: ``"cpu"`` or ``"cuda"``.
        env: further environment variables of the rank processes.

    ``{rank}`` in a value of ``env`` stands for the rank.
    """

    def __init__(
        self,
        backend: str,
        world_size: int,
        ranks_per_device: int = 1,
        *,
        processes: bool | None = None,
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.world_size = world_size
        self.ranks_per_device = ranks_per_device
        self.processes = backend != "threads" if processes is None else processes
        self.device = device
        self.starts = 0
        self._env = dict(env or {})
        self._ranks: list[_Rank] = []
        self._directory: Path | None = None
        self._cases = 0
        self._last_words: list[str] = []

    # ---------------------------------------------------------------------------------------- cases

    def run(
        self,
        case: str | Callable[..., Any],
        *,
        timeout_s: float = CASE_TIMEOUT_S,
        transport_timeout_s: float = TRANSPORT_TIMEOUT_S,
        transport: bool = True,
        exits: Mapping[int, int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a case on all ranks and return what it returned, by rank.

        Args:
            case: ``module:function``, ``file.py:function``, or such a function.
            timeout_s: the watchdog.
            transport_timeout_s: limit of the transports' waits.
            transport: True: ``fn(transport, **kwargs)``. False: ``fn(ranks, **kwargs)`` with a
                ``Ranks``, and the case makes what it needs (groups by ``torch.distributed``, which
                is initialised in processes).
            exits: ranks that are meant to end in this case, with their exit codes (result None).
                The survivors must answer, and end with exit code 0 afterwards; the pool then starts
                anew.
            kwargs: the case's arguments; JSON values.

        Raises:
            CaseError: a rank raised, ended or did not answer; the pool has dropped its ranks.
        """
        self._cases += 1
        order = Order(
            self._cases, case_path(case), kwargs, self.backend, transport, transport_timeout_s
        )
        if not self.processes:
            if exits:
                raise ValueError("ranks that are threads cannot end on their own")
            return self._run_threads(order, timeout_s)
        if not self._ranks:
            self._start()
        try:
            results, failures = self._run_processes(order, timeout_s, dict(exits or {}))
        except (
            BaseException
        ):  # interrupted: answers to this case may still come, and none is for the next
            self._kill()
            raise
        if failures:
            message = self._report(order, failures)
            self._kill()
            raise CaseError(message, failures)
        if exits:
            survivors = {rank for rank in range(self.world_size) if rank not in exits}
            codes = self.close()
            wrong = {
                rank: f"exit code {codes[rank]}\n{self._last_words[rank]}"
                for rank in survivors
                if codes[rank] != 0
            }
            if wrong:
                lines = [f"rank {rank}: {text}" for rank, text in wrong.items()]
                raise CaseError("\n".join([f"{order.case}: survivors:", *lines]), wrong)
        return results

    def _run_processes(
        self, order: Order, timeout_s: float, exits: dict[int, int]
    ) -> tuple[list[Any], dict[int, str]]:
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks)}
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # it ended; seen below
                rank.connection.send_bytes(pickle.dumps(order))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for number in waiting.values():
                    failures[number] = f"no answer after {timeout_s:g} s"
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                number = waiting.pop(connection)
                answer = self._answer(number, connection, exits)
                if answer.failure is not None:
                    failures[number] = answer.failure
                    # The others end by their own timeouts; a pool waits no longer than that.
                    deadline = min(deadline, time.monotonic() + 2 * order.timeout_s + 5)
                results[number] = answer.result
        return results, failures

    def _answer(self, number: int, connection: Connection, exits: dict[int, int]) -> Answer:
        try:
            answer: Answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = self._ranks[number].process.wait(_TERMINATE_S)
            if code == exits.get(number):
                return Answer()
            return Answer(failure=f"ended with exit code {code}")
        except Exception:  # of a class that only the rank knows, say
            return Answer(failure=f"its result does not load here:\n{traceback.format_exc()}")
        if number in exits and answer.failure is None:
            return Answer(failure=f"should have ended with exit code {exits[number]}")
        return answer

    def _report(self, order: Order, failures: dict[int, str]) -> str:
        if any(text.startswith("no answer") for text in failures.values()):
            self._dump_stacks()
        lines = [f"{order.case} on {self.backend}, {self.world_size} ranks, {order.kwargs}"]
        for number, rank in enumerate(self._ranks):
            failure = failures.get(number)
            lines.append(f"--- rank {number}: " + ("ok" if failure is None else "FAILED"))
            if failure is not None:
                lines.append(failure.rstrip())
            tail = rank.tail()
            if tail and failures:
                lines += [f"    stderr of rank {number}:", tail]
        return "\n".join(lines)

    def _dump_stacks(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)

    # ------------------------------------------------------------------------------------ processes

    def _start(self) -> None:
        self.starts += 1
        self._directory = Path(tempfile.mkdtemp(prefix="cpt-ranks-"))
        for number in range(self.world_size):
            self._ranks.append(self._start_rank(number, self._directory))
        deadline = time.monotonic() + _START_TIMEOUT_S
        for number, rank in enumerate(self._ranks):
            started = rank.connection.poll(max(0.0, deadline - time.monotonic()))
            answer = self._answer(number, rank.connection, {}) if started else None
            if answer is None or answer.failure is not None:
                order = Order(0, "start", {}, self.backend, False, 0.0)
                why = "no answer at start" if answer is None else str(answer.failure)
                message = self._report(order, {number: why})
                self._kill()
                raise CaseError(message, {number: why})

    def _start_rank(self, number: int, directory: Path) -> _Rank:
        ours, theirs = Pipe()
        index = number // self.ranks_per_device
        device = f"cuda:{index}" if self.device == "cuda" else "cpu"
        log = directory / f"rank{number}.log"
        command = [sys.executable, "-m", "cptransport.testing.worker"]
        command += ["--connection", str(theirs.fileno()), "--rank", str(number)]
        command += ["--world-size", str(self.world_size), "--device", device]
        command += ["--rendezvous", str(directory / "store")]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=self._environment(number),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        return _Rank(process, ours, log)

    def _environment(self, number: int) -> dict[str, str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        env.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
        env.update({key: value.replace("{rank}", str(number)) for key, value in self._env.items()})
        return env

    def close(self) -> list[int]:
        """End the ranks and return their exit codes; the next ``run`` starts new ones."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + 2 * _TERMINATE_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.1, deadline - time.monotonic()))
        return self._kill()

    def _kill(self) -> list[int]:
        """End what still runs of every rank's session, and forget the ranks; returns exit codes."""
        codes = [rank.process.poll() for rank in self._ranks]
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [rank for rank in self._ranks if rank.process.poll() is None]
            for rank in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)
            deadline = time.monotonic() + _TERMINATE_S
            for rank in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.1, deadline - time.monotonic()))
        for rank in self._ranks:  # what a rank that has ended left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        for index, rank in enumerate(self._ranks):
            codes[index] = rank.process.returncode if codes[index] is None else codes[index]
            rank.connection.close()
        self._last_words = [rank.tail() for rank in self._ranks]
        self._ranks.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        return [-1 if code is None else code for code in codes]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run_threads(self, order: Order, timeout_s: float) -> list[Any]:
        answers, stacks = run_threads(order, self.world_size, self.device, timeout_s)
        failures = {
            number: f"no answer after {timeout_s:g} s" if answer is None else str(answer.failure)
            for number, answer in enumerate(answers)
            if answer is None or answer.failure is not None
        }
        if not failures:
            return [answer.result for answer in answers if answer is not None]
        lines = [f"{order.case} on {self.backend}, {self.world_size} threads, {order.kwargs}"]
        for number in range(self.world_size):
            lines.append(f"--- rank {number}: " + ("FAILED" if number in failures else "ok"))
            lines.append(failures.get(number, ""))
        raise CaseError("\n".join([*lines, stacks]), failures)


# ------------------------------------------------------------------------------------- shared pools

_pools: dict[tuple[Any, ...], RankPool] = {}


def pool(
    backend: str,
    world_size: int,
    ranks_per_device: int = 1,
    *,
    processes: bool | None = None,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
) -> RankPool:
    """Return the shared pool of these arguments (see ``RankPool``)."""
    key = (backend, world_size, ranks_per_device, processes, device, *sorted((env or {}).items()))
    if key not in _pools:
        _pools[key] = RankPool(
            backend, world_size, ranks_per_device, processes=processes, device=device, env=env
        )
    return _pools[key]


def close_pools() -> None:
    """End the ranks of all shared pools."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_pools)


def run_ranks(
    case: str | Callable[..., Any],
    *,
    backend: str = "threads",
    world_size: int = 2,
    ranks_per_device: int = 1,
    device: str = "cpu",
    timeout_s: float = CASE_TIMEOUT_S,
    transport_timeout_s: float = TRANSPORT_TIMEOUT_S,
    transport: bool = True,
    env: Mapping[str, str] | None = None,
    exits: Mapping[int, int] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run a case on the shared pool of a backend; see ``RankPool.run``.

    Example::

        def sums(transport, rows):            # at the top of a module or of a test file
            ...
            return transport.rank

        assert run_ranks(sums, backend="gloo", world_size=3, rows=4) == [0, 1, 2]
    """
    shared = pool(backend, world_size, ranks_per_device, device=device, env=env)
    return shared.run(
        case,
        timeout_s=timeout_s,
        transport_timeout_s=transport_timeout_s,
        transport=transport,
        exits=exits,
        **kwargs,
    )
