"""The limits of the machine (memcpy and BLAKE3 with one thread each), and pickle over a pipe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
from blake3 import blake3

from benchmarks.paths.measuring import Case, Helper, Measured, measure, requests


def limits(case: Case, *, quick: bool) -> Iterator[Measured]:
    """Measure copying the payloads to warm memory, and hashing them."""
    payloads = case.payloads()
    targets = [np.ones_like(payload) for payload in payloads]

    def copy(_: object) -> None:
        for target, payload in zip(targets, payloads, strict=True):
            np.copyto(target, payload)

    yield measure("memcpy", case, copy, quick=quick)
    yield measure("blake3", case, lambda _: [blake3(payload).digest() for payload in payloads], quick=quick)


def send_arrays(pipe: Connection) -> None:
    """Reply to each case with its arrays, pickled one by one. This is the main function of the helper process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    payloads: list[np.ndarray] = []
    for verb, *args in requests(pipe):
        if verb == "make":
            payloads = args[0].payloads()
            pipe.send(None)
        else:
            for payload in payloads:
                pipe.send(payload)


def pickled(sender: Helper, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Measure receiving arrays of another process through `multiprocessing`'s pipe."""
    sender.ask("make", case)

    def receive(_: object) -> list[np.ndarray]:
        sender.pipe.send(("send",))
        return [sender.pipe.recv() for _ in range(case.count)]

    yield measure("pickle/pipe", case, receive, quick=quick)
    sender.ask("make", case.first())
