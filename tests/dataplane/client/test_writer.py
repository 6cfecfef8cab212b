"""Tests that a worker can write arrays straight into the node's memory, and that unsealed arrays disappear with their
worker."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.client.writer import Writer
from dataplane.core.errors import BadRequestError, OutOfSpaceError
from dataplane.core.refs import ArraySpec
from tests.dataplane.shards import wait_until


def test_what_is_written_in_place_is_read_back_without_a_hash(
    node: EmbeddedNode, client: Client, reader: Reader
) -> None:
    with Writer(node.uri, timeout_s=20) as writer:
        with writer.create("w/one", "float32", (3, 4), meta={"step": 1}) as place:
            place.array[:] = np.arange(12, dtype=np.float32).reshape(3, 4)
        assert place.ref is not None and place.ref.version > 0 and place.ref.meta == {"step": 1}
        assert not place.array.flags.writeable
        specs = [ArraySpec(name=f"w/many/{at}", dtype="int16", shape=(at, 2)) for at in range(20)]
        with writer.create_many(specs) as places:
            for at, one in enumerate(places):
                one.array[:] = at
        refs = [one.ref for one in places if one.ref is not None]
        views = reader.resolve([place.ref, *refs])
        assert views[0].tolist() == np.arange(12).reshape(3, 4).tolist()
        assert [view.shape for view in views[1:]] == [(at, 2) for at in range(20)]
        assert all((view == at).all() for at, view in enumerate(views[1:]))
        with pytest.raises(BadRequestError, match="exists with other content"):
            with writer.create("w/one", "float32", (3, 4)) as place:
                place.array[:] = 0
        del views
        assert client.release(refs) == 20
        client.release_names(["w/one"])
    wait_until(lambda: client.stat()["used_bytes"] == 0)


def test_a_block_that_raises_gives_its_places_back(node: EmbeddedNode, client: Client) -> None:
    with Writer(node.uri, timeout_s=60) as writer:
        with pytest.raises(RuntimeError, match="no"):
            with writer.create("w/broken", "uint8", (1 << 20,)):
                assert client.stat()["used_bytes"] == 1 << 20
                raise RuntimeError("no")
        wait_until(lambda: client.stat()["used_bytes"] == 0)
        for dtype, shape in (("object", (1,)), ("uint8", (-1,))):
            with pytest.raises(BadRequestError):
                with writer.create("w/bad", dtype, shape):
                    pass
        with pytest.raises(OutOfSpaceError, match="can never fit"):
            with writer.create("w/huge", "uint8", (1 << 40,)):
                pass
        specs = [ArraySpec(name=f"w/{at}", dtype="uint8", shape=(9 << 20,)) for at in range(2)]
        with pytest.raises(OutOfSpaceError, match="2 objects of 18 MiB can never fit"):
            with writer.create_many(specs):
                pass
        assert client.stat()["used_bytes"] == 0


def test_a_list_of_which_one_is_refused_publishes_nothing(node: EmbeddedNode, client: Client) -> None:
    client.put(b"taken", name="l/taken")
    for names in (["l/1", "l/taken", "l/2"], ["l/1", "l/2", "l/1"]):
        with Writer(node.uri, timeout_s=60) as writer, pytest.raises(BadRequestError, match=r"other content|twice"):
            with writer.create_many([ArraySpec(name=name, dtype="uint8", shape=(5,)) for name in names]) as places:
                for at, place in enumerate(places):
                    place.array[:] = at
        assert client.stat()["num_objects"] == 1
    with Writer(node.uri, timeout_s=60) as writer:
        with writer.create_many([ArraySpec(name="l/same", dtype="uint8", shape=(5,))] * 2) as places:
            for place in places:
                place.array[:] = 7
        assert places[0].ref == places[1].ref
    assert client.release_names(["l/taken", "l/same"]) == 2


WRITER = """
    import sys, time
    from dataplane.client.writer import Writer
    with Writer(sys.argv[1]).create("w/killed", "uint8", (1 << 20,)) as place:
        place.array[:] = 7
        print("written", flush=True)
        time.sleep(60)
"""


def test_a_writer_that_is_killed_leaves_nothing(node: EmbeddedNode, client: Client) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), node.uri]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"written\n"
        assert client.stat()["used_bytes"] == 1 << 20
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    wait_until(lambda: client.stat()["used_bytes"] == 0)
    assert client.stat()["num_objects"] == 0
