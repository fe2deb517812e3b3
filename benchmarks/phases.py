"""Jobs under torchrun that answer requests while they run, and keep their state between requests.

Requests and answers are numbered files in a folder: ``ask-0.json``, ``answer-0.json``, ... Between requests, the machine
may change, for example the rate of a link.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.cluster import Cluster
from costmodel.text.files import write_atomically

__all__ = ["answered", "asking"]

_POLL = 0.2  # seconds


@contextmanager
def asking(
    cluster: Cluster, script: Sequence[str], folder: Path, timeout: float
) -> Iterator[Callable[..., dict[str, float]]]:
    """Runs a job in a cluster during the block; yields a function that sends a request and waits for the answer.

    Args:
        cluster: The cluster to run in.
        script: The script and its arguments; ``folder`` is appended to them, for which the script calls `answered`.
        folder: An empty folder for requests and answers.
        timeout: The time limit of the job in seconds.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            cluster.run([*script, str(folder)], timeout=timeout)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits for an answer
            failed.append(error)

    job = threading.Thread(target=work)
    job.start()
    number = 0

    def ask(**request: Any) -> dict[str, float]:
        nonlocal number
        write_atomically(folder / f"ask-{number}.json", json.dumps(request))
        answer = folder / f"answer-{number}.json"
        while job.is_alive() and not answer.exists():
            time.sleep(_POLL)
        if not answer.exists():
            raise failed[0] if failed else RuntimeError("the job ended before it answered")
        number += 1
        found: dict[str, float] = json.loads(answer.read_text())
        return found

    try:
        yield ask
    finally:
        write_atomically(folder / f"ask-{number}.json", json.dumps(None))
        job.join()
    if failed:
        raise failed[0]


def answered(folder: Path, answer: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """Answers requests until the last one; every rank must call it, and only rank 0's answers are returned."""
    number = 0
    while (request := _next(folder / f"ask-{number}.json")) is not None:
        found = answer(request)
        if dist.get_rank() == 0:
            write_atomically(folder / f"answer-{number}.json", json.dumps(found))
        number += 1


def _next(file: Path) -> dict[str, Any] | None:
    """Waits for a request and returns it on every rank; None after the last one."""
    if dist.get_rank() == 0:
        while not file.exists():
            time.sleep(_POLL)
    found: list[Any] = [json.loads(file.read_text()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    request: dict[str, Any] | None = found[0]
    return request
