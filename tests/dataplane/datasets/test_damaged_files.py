"""Tests with files of every format that were cut or changed at random: a parser answers each with rows or with an
error, and where one dies, the node and the other files go on."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.core.errors import DatasetError
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.parsing.pool import ParserPool
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.shards import encode, noise, write_shard
from tests.dataplane.tables import verl_table, write_lines, write_parquet

IMAGES = [encode(noise(at, 28, 28)) for at in range(4)]
NUM_EACH = 60


def whole_files(folder: Path) -> list[Path]:
    """Write a good file of each form."""
    table = verl_table([IMAGES[:1], IMAGES[1:3], []])
    paths = [write_parquet(folder / "plain.parquet", table), folder / "zstd.parquet"]
    pq.write_table(table, paths[1], compression="zstd", use_dictionary=False, data_page_version="2.0")
    for name, options in (("a.arrow", None), ("lz4.arrow", pa.ipc.IpcWriteOptions(compression="lz4"))):
        with pa.ipc.new_stream(str(folder / name), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=2)
        paths.append(folder / name)
    rows = [
        {"n": at, "image": "0.png", "messages": [{"content": [{"type": "image", "image": "0.png"}]}]} for at in (1, 2)
    ]
    (folder / "a.json").write_text(json.dumps(rows))
    paths += [write_lines(folder / "a.jsonl", rows), folder / "a.json"]
    return [*paths, write_shard(folder / "a.tar", {str(at): data for at, data in enumerate(IMAGES)})]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes cut, with bits flipped, with a range overwritten, or with a range left out."""
    changed = bytearray(data)
    how = rng.randrange(5)
    # headers and footers say where all the rest is
    at = rng.choice([rng.randrange(len(data)), rng.randrange(min(600, len(data))), len(data) - 1 - rng.randrange(600)])
    at = max(0, at)
    if how == 0:
        return bytes(changed[:at])
    if how == 1:
        del changed[at : at + rng.randrange(1, 64)]
    elif how == 2:
        changed[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])
    else:
        for _ in range(1 if how == 3 else 12):
            place = min(len(changed) - 1, max(0, at + rng.randrange(-40, 40)))
            changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("seed", range(2))
def test_every_damaged_file_is_answered_and_the_node_stays(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    (tmp_path / "0.png").write_bytes(IMAGES[0])
    roots: dict[str, list[str]] = {}
    for path in whole_files(tmp_path):
        roots[f"good {path.name}"] = [str(path)]
        for at in range(NUM_EACH):
            bad = tmp_path / f"{path.stem}-{at}{path.suffix}"
            bad.write_bytes(damaged(path.read_bytes(), rng))
            roots[bad.name] = [str(bad)]
    node = Node(NodeConfig(memory_bytes=1 << 20, roots=roots))
    num_rows = num_errors = 0
    try:
        datasets = node.services.datasets
        for name in roots:
            try:
                num_samples = datasets.ingest(name).num_samples
                samples = datasets.samples(name, range(min(num_samples, 20)))
                for ref in (ref for sample in samples for ref in sample.media):
                    assert ref.lineage is not None
                    place = datasets.locate(ref.lineage)
                    assert len(place.file.read(place.offset, place.nbytes)) == ref.nbytes
                num_rows += 1
            except DatasetError as error:
                assert not name.startswith("good"), error
                num_errors += 1
        assert num_rows > 8 + NUM_EACH and num_errors > NUM_EACH
        assert node.stat()["num_parsers"] == 1
    finally:
        node.stop()


def test_what_damaged_files_hold_is_the_same_with_and_without_a_process(tmp_path: Path) -> None:
    rng = random.Random(7)
    (tmp_path / "0.png").write_bytes(IMAGES[0])
    pool = ParserPool()
    try:
        for path in whole_files(tmp_path):
            if path.suffix in (".json", ".jsonl", ".tar"):  # Python's code, which no file crashes
                for _ in range(30):
                    path.with_name(f"bad{path.suffix}").write_bytes(damaged(path.read_bytes(), rng))
                    pattern = {"d": [str(path.with_name(f"bad{path.suffix}"))]}
                    found = [said(Catalog(pattern, "node", parser=parser)) for parser in (pool, None)]
                    assert found[0] == found[1]
    finally:
        pool.close()
    assert pool.stat()["num_parser_restarts"] == 0


def said(catalog: Catalog) -> str:
    try:
        return str(catalog.samples("d", range(catalog.ingest("d").num_samples)))
    except DatasetError as error:
        return str(error)
