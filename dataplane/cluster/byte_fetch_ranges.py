"""Receiving one big object over several byte connections, one range over each: the whole object with the right digest,
or nothing.

One connection transfers as much as one core can handle. The first range is hashed while it is received, the others
afterwards in their order.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from blake3 import blake3

from dataplane.client.download import Call, Sink, check_same, spans, verify
from dataplane.cluster.ahead import Ahead
from dataplane.cluster.byte_fetch import PART_BYTES, announced_in, checked_info, end_answer, next_objects
from dataplane.core.byte_socket import ByteSocket
from dataplane.core.digests import digest_of
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.flight_errors import from_body
from dataplane.core.refs import Ref


def receive_ranges(
    lines: Sequence[ByteSocket], wanted: Ref, sink: Sink, call: Call, threads: ThreadPoolExecutor
) -> None:
    """Receive one big object, one range over each connection. Raises the error that broke any of them; no partial
    object stays."""
    start, length = spans(wanted.nbytes, len(lines))[0]
    _ask_range(lines[0], wanted, (start, length), call)
    found = _range_info(lines[0], wanted, call)
    if isinstance(found, DataPlaneError):
        end_answer(lines[0], call)
        sink.failed(0, found)
        return
    ref, digest = found
    check_same(wanted, ref)
    try:
        target = sink.open(0, ref)
    except DataPlaneError as error:
        # report the error first: there may be no time left to receive bytes that will be thrown away
        sink.failed(0, error)
        lines[0].drain(length, call.deadline)
        end_answer(lines[0], call)
        return
    try:
        verify(ref, _fill_all(lines, wanted, digest, target, call, threads), digest)
        sink.done([(0, ref, digest)])
    except BaseException:
        sink.discard(0)  # every thread that wrote has ended
        raise


def _fill_all(
    lines: Sequence[ByteSocket], wanted: Ref, digest: str, target: np.ndarray, call: Call, threads: ThreadPoolExecutor
) -> str:
    """Receive every range and return the digest of the whole object. The first range was requested before this call."""
    parts = spans(wanted.nbytes, len(lines))
    hashed = blake3(max_threads=blake3.AUTO)
    with ThreadPoolExecutor(max(1, len(parts) - 1), thread_name_prefix="range") as others:
        coming = [
            others.submit(_fetch_range, line, wanted, digest, part, target, call)
            for line, part in zip(lines[1:], parts[1:], strict=False)
        ]
        _fill_hashed(lines[0], target[: parts[0][1]], hashed, call, threads)
        for future, (start, length) in zip(coming, parts[1:], strict=True):
            future.result()
            hashed.update(target[start : start + length].data)
    return digest_of(hashed)


def _ask_range(line: ByteSocket, wanted: Ref, part: tuple[int, int], call: Call) -> None:
    line.send(call.body(ref=wanted.to_dict(), start=part[0], length=part[1]))


def _range_info(line: ByteSocket, wanted: Ref, call: Call) -> tuple[Ref, str] | DataPlaneError:
    """Return the ref and digest of the whole object from the header of a range, or the error in the header."""
    while not (objects := next_objects(line, call)):
        if objects is None:
            raise ChecksumError(f"an answer ended before a range of {wanted.name} had come")
    info = checked_info(objects[0])
    return from_body(info) or announced_in(info, wanted)


def _fetch_range(
    line: ByteSocket, wanted: Ref, digest: str, part: tuple[int, int], target: np.ndarray, call: Call
) -> None:
    _ask_range(line, wanted, part, call)
    found = _range_info(line, wanted, call)
    if isinstance(found, DataPlaneError):
        raise found
    if found[1] != digest:
        raise ChecksumError(f"{wanted.name} was written again while its ranges were sent")
    line.fill([target[part[0] : part[0] + part[1]].data], call.deadline)
    end_answer(line, call)


def _fill_hashed(line: ByteSocket, target: np.ndarray, hashed: blake3, call: Call, threads: ThreadPoolExecutor) -> None:
    """Receive a range, and hash the received bytes while the next ones come."""
    ahead = Ahead(threads)
    try:
        for start in range(0, len(target), PART_BYTES):
            part = target[start : start + PART_BYTES].data
            line.fill([part], call.deadline)
            ahead.then(partial(hashed.update, part))
        end_answer(line, call)
        ahead.wait()
    finally:
        ahead.end()
