"""Tests of what whole-run tests find of a run: all of its processes, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

from dataplane.client.client import Client
from tests.dataplane.shards import RECIPE, encode, noise
from tests.yatt_mm import runs


def test_a_decode_worker_is_found_although_it_gets_hardly_anything_of_its_environment(tmp_path: Path) -> None:
    before = runs.shared_memory()
    command = ["serve", "--port", "0", "--memory", "16MiB"]
    with runs.started(command, temporary=tmp_path, module="dataplane") as (process, mark):
        assert process.stdout is not None
        greeting = next(line for line in process.stdout if "serving at " in line)
        uri = greeting.split("serving at ")[1].split()[0]
        with Client(uri) as client:
            client.derive([client.put_source(encode(noise(1)))], RECIPE)
        found = runs.leftovers(mark, before, tmp_path)
        assert sum("dataplane serve" in line for line in found) == 1
        assert sum("derive.worker_main" in line for line in found) >= 1, found
        process.terminate()
        left = runs.finish(process, mark, before, tmp_path).left_behind
    assert not [line for line in left if not line.startswith("/dev/shm/")], "others may kill nodes beside this test"
