"""Tests of parsers in processes of their own: what a file does to its parser is an error of this file alone, and the
node and its other data sets go on."""

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pytest

from dataplane.core.errors import DatasetError, NodeTimeoutError
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.formats.parser import READING, Reply, TaskLimits, opening
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.parsing import bad_files
from dataplane.datasets.parsing.pool import ParserPool
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.datasets.faulty_parsers import FAULT, TABLE, file_of, hook
from tests.dataplane.shards import encode, has_ended, noise, wait_until, write_shard
from tests.dataplane.tables import verl_table, write_lines, write_parquet

IMAGES = [encode(noise(at)) for at in range(6)]


@pytest.fixture
def pool() -> Iterator[ParserPool]:
    opened = ParserPool()
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the same images in a set of every format."""
    write_parquet(tmp_path / "a.parquet", verl_table([IMAGES[:2], IMAGES[2:3], []]))
    table = verl_table([IMAGES[:1], IMAGES[1:2]])
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(str(tmp_path / "small.arrow"), table.schema, options=options) as writer:
        writer.write_table(table)
    write_shard(tmp_path / "a.tar", {str(at): data for at, data in enumerate(IMAGES[:3])})
    (tmp_path / "0.png").write_bytes(IMAGES[0])
    write_lines(tmp_path / "a.jsonl", [{"n": at, "image": "0.png"} for at in range(5)])
    (tmp_path / "a.json").write_text(json.dumps([{"n": at, "text": "\ud800é"} for at in range(5)]))
    return tmp_path


def all_of(path: Path, parser: ParserPool | None) -> list[Any]:
    """Return the samples of a set, and where their media are."""
    catalog = Catalog({"d": [str(path)]}, "node", parser=parser)
    samples = catalog.samples("d", range(catalog.ingest("d").num_samples))
    lineages = [ref.lineage for sample in samples for ref in sample.media]
    places = [catalog.locate(lineage) for lineage in lineages if lineage is not None]
    return [samples, [(place.offset, place.file.read(place.offset, place.nbytes)) for place in places]]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "small.arrow", "a.tar", "a.jsonl", "a.json"])
def test_a_parser_gives_what_this_process_would_read(folder: Path, pool: ParserPool, name: str) -> None:
    found = all_of(folder / name, pool)
    assert found == all_of(folder / name, None)
    assert found[0] and pool.stat() == {"num_parsers": 1, "num_parser_restarts": 0}


def test_rows_of_many_bytes_arrive_whole(tmp_path: Path, pool: ParserPool) -> None:
    big = [np.random.default_rng(at).bytes((3 << 20) + at) for at in range(4)]
    path = write_parquet(tmp_path / "a.parquet", verl_table([big[:3], big[3:]]))
    assert [data for _, data in all_of(path, pool)[1]] == big


def test_a_parser_reads_remote_files_through_the_node(folder: Path, pool: ParserPool) -> None:
    filesystem = fsspec.filesystem("memory")
    for name in ("a.parquet", "a.jsonl", "a.tar", "a.arrow"):
        filesystem.pipe(f"/parsed/{name}", (folder / name).read_bytes())
    try:
        for name in ("a.parquet", "a.jsonl", "a.tar", "a.arrow"):
            catalog = Catalog({"d": [f"memory://parsed/{name}"]}, "node", parser=pool)
            assert catalog.ingest("d").num_samples == Catalog({"d": [str(folder / name)]}, "n").ingest("d").num_samples
            sample = catalog.samples("d", [1])[0]
            assert sample.fields == Catalog({"d": [str(folder / name)]}, "n").samples("d", [1])[0].fields
        filesystem.rm("/parsed/a.parquet")
        with pytest.raises(DatasetError, match=r"^cannot read /parsed/a.parquet") as raised:
            pool.call("table", RangeFile("/parsed/a.parquet", 99, "", filesystem), TABLE, print, READING)
        assert str(raised.value).count("cannot read") == 1, "the node's own error, not the parser's about it"
    finally:
        filesystem.rm("/parsed", recursive=True)
    assert pool.stat()["num_parser_restarts"] == 0


TOO_MUCH = "bad.jsonl takes more memory than a parser may use"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("os.abort()", r"bad.jsonl crashed the parser \(signal SIGABRT\); it is left alone until it changes"),
        ("__import__('ctypes').string_at(8)", r"bad.jsonl crashed the parser \(signal SIGSEGV\)"),
        ("os._exit(3)", r"the parser ended \(exit status 3\) while it read .*bad.jsonl"),
        ("bytearray(1 << 40)", TOO_MUCH),
        ("[__import__('numpy').empty(1 << 28, 'u1') for _ in range(20)]", TOO_MUCH),
    ],
)
def test_a_file_that_ends_its_parser_fails_alone_and_is_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    hook(monkeypatch, folder, FAULT.format(fault=fault))
    write_lines(folder / "bad.jsonl", [{"n": at} for at in range(5)])
    pool = ParserPool()
    try:
        bad = Catalog({"d": [str(folder / "bad.jsonl")]}, "node", parser=pool)
        assert bad.ingest("d").num_samples == 5
        for _ in range(3):
            with pytest.raises(DatasetError, match=message):
                bad.samples("d", [0])
        assert pool.stat()["num_parser_restarts"] == (0 if "memory" in message else 2)
        assert all_of(folder / "a.jsonl", pool)[0][4].fields == {"n": 4}
        os.utime(folder / "bad.jsonl", (1, 1))
        assert bad.ingest("d").num_samples == 5
        with pytest.raises(DatasetError, match=message):
            bad.samples("d", [0])
        assert pool.stat()["num_parser_restarts"] == (0 if "memory" in message else 4), "a file that changed is tried"
    finally:
        pool.close()


def test_an_arrow_file_that_aborts_arrow_ends_a_parser_and_not_the_node(folder: Path) -> None:
    cells = pa.array([{"bytes": b"x", "path": None}] * 77)
    path = folder / "hostile.arrow"
    with pa.ipc.new_stream(str(path), pa.schema({"image": cells.type})) as writer:
        writer.write_table(pa.table({"image": cells}))
    of_struct, of_bytes = (struct.pack("<qq", 77, 0) * 2, struct.pack("<qqqq", 77, 0, -(2**40), 0))
    assert path.read_bytes().count(of_struct) == 1
    path.write_bytes(path.read_bytes().replace(of_struct, of_bytes))  # a struct with a child of a negative length
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"bad": [str(path)], "good": [str(folder / "a.arrow")]}))
    try:
        assert node.services.datasets.ingest("bad").num_samples == 77
        for _ in range(2):
            with pytest.raises(DatasetError, match=r"hostile.arrow crashed the parser \(signal SIGABRT\)"):
                node.services.datasets.samples("bad", [0])
        assert len(node.services.datasets.samples("good", [0])[0].media) == 1
        assert node.stat()["num_parser_restarts"] == 2
    finally:
        node.stop()


def test_a_file_that_takes_too_long_fails_alone_and_is_tried_again_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook(monkeypatch, folder, FAULT.format(fault="time.sleep(600)"))
    short = TaskLimits(timeout_s=0.5, max_reply_bytes=1 << 20)
    arguments: dict[str, Any] = {"items": [], "names": {"media": [], "optional": [], "drop": []}, "part": None}
    file = file_of(write_lines(folder / "bad.jsonl", [{"n": 1}]))
    pool = ParserPool()
    try:
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(DatasetError, match=r"bad.jsonl could not be parsed in 0 s, which is the limit"):
                pool.call("json rows", file, arguments, print, short)
            assert time.monotonic() - started < 30
        assert pool.stat()["num_parser_restarts"] == 2
        pool.call("json rows", file_of(folder / "a.jsonl"), arguments, print, READING)
        monkeypatch.setattr(bad_files.time, "monotonic", lambda now=time.monotonic: now() + bad_files.EXPIRY_S)
        with pytest.raises(DatasetError, match="could not be parsed"):
            pool.call("json rows", file, arguments, print, short)
        assert pool.stat()["num_parser_restarts"] == 3
    finally:
        pool.close()


def test_a_parser_that_is_killed_in_the_middle_is_replaced_and_its_task_done_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = folder / "started"
    fault = f"open({str(started)!r}, 'x').close() or time.sleep(600) if not os.path.exists({str(started)!r}) else None"
    hook(monkeypatch, folder, FAULT.format(fault=fault))
    write_lines(folder / "bad.jsonl", [{"n": at} for at in range(5)])
    pool = ParserPool()
    try:
        catalog = Catalog({"d": [str(folder / "bad.jsonl")]}, "node", parser=pool)
        catalog.ingest("d")
        (pid,) = pool.pids()

        def kill() -> None:
            wait_until(started.exists)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        assert catalog.samples("d", [3])[0].fields == {"n": 3}
        killer.join()
        assert pool.pids() != [pid] and pool.stat() == {"num_parsers": 1, "num_parser_restarts": 1}
        (idle,) = pool.pids()
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: has_ended(psutil.Process(idle)) if psutil.pid_exists(idle) else True)
        assert catalog.samples("d", [4])[0].fields == {"n": 4}
        assert pool.stat() == {"num_parsers": 1, "num_parser_restarts": 2}
    finally:
        pool.close()


def test_rows_do_not_wait_for_files_that_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = FAULT.replace('"bad" in file.path and task.endswith("rows")', '"bad" in file.path').format(
        fault="time.sleep(600)"
    )
    hook(monkeypatch, folder, slow)
    file = file_of(write_lines(folder / "bad.jsonl", [{"n": 1}]))
    pool = ParserPool(max_processes=2)
    errors: list[Exception] = []

    def open_slowly() -> None:
        try:
            pool.call("json items", file, {}, print, opening(file))
        except (NodeTimeoutError, DatasetError) as error:
            errors.append(error)

    threads = [threading.Thread(target=open_slowly) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: pool.stat()["num_parsers"] == 1)
        arguments: dict[str, Any] = {"items": [], "names": {"media": [], "optional": [], "drop": []}, "part": None}
        pool.call("json rows", file_of(folder / "a.jsonl"), arguments, print, READING)
        assert pool.stat() == {"num_parsers": 2, "num_parser_restarts": 0}
    finally:
        pool.close()
        for thread in threads:
            thread.join(30)
    assert len(errors) == 3 and all("the node is stopping" in str(error) for error in errors)


def test_idle_parsers_end_when_there_are_enough(folder: Path) -> None:
    pool = ParserPool(max_processes=4)
    inside, leave = threading.Barrier(4), threading.Event()

    def take(reply: Reply) -> None:
        inside.wait(60)
        leave.wait(60)

    file = file_of(folder / "a.jsonl")
    limits = TaskLimits(timeout_s=60, max_reply_bytes=1 << 20)
    threads = [threading.Thread(target=pool.call, args=("json items", file, {}, take, limits)) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        inside.wait(60)
        assert pool.stat()["num_parsers"] == 3
        pids = pool.pids()
        leave.set()
        for thread in threads:
            thread.join(60)
        assert pool.stat() == {"num_parsers": 2, "num_parser_restarts": 0}
        wait_until(lambda: sum(map(psutil.pid_exists, pids)) == 2)
    finally:
        leave.set()
        pool.close()
