"""Tests that all processes and files of an engine end with it, whether the engine was healthy or not."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.yatt_mm.rollout.conftest import Prompts, Run, engine_config
from yatt_mm.common.owned_dirs import LOCK_FILE
from yatt_mm.protocol.published import Published
from yatt_mm.rollout import vllm_environment
from yatt_mm.rollout.engine_process import EngineProcess
from yatt_mm.rollout.vllm_engine import EngineError, VllmEngine
from yatt_mm.weights.segment_writer import write_segment


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], set[object]]]:
    """Return a function that tells which of our processes, shared memory and temporary files are new since the test
    began."""
    with tempfile.TemporaryDirectory(prefix="yt-") as own_tmp_dir:
        monkeypatch.setattr(tempfile, "tempdir", own_tmp_dir)
        children_before, shared_memory_before = _children(), set(Path("/dev/shm").iterdir())
        yield lambda: {
            *(_children() - children_before),
            *_abandoned(set(Path("/dev/shm").iterdir()) - shared_memory_before),
            *Path(own_tmp_dir).iterdir(),
        }


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _abandoned(shared_memory: set[Path]) -> set[Path]:
    """Return the shared memory that no living process maps; the rest belongs to other work on this machine.

    A killed process's locks (sem.mp-*) are left out: multiprocessing's tracker, which the shared engine keeps alive,
    removes them when it ends. Left out too is what no engine makes: the weights that runs publish (yatt-weights-*), and
    the memory of data-plane nodes (dataplane-*), which other tests start at the same time.
    """
    others = ("sem.mp-", "yatt-weights-", "dataplane-")
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped.update(line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/dev/shm" in line)
    return {p for p in shared_memory if p.exists() and str(p) not in mapped and not p.name.startswith(others)}


@pytest.mark.parity
def test_an_engine_that_does_not_normalise_is_given_normalised_patches_and_leaves_nothing_behind(
    engine: VllmEngine, prompts: Prompts, run: Run, tiny_dir: Path, leftovers: Callable[[], set[object]]
) -> None:
    environment = dict(os.environ)

    async def other_engine() -> None:
        other = await VllmEngine.start(engine_config(tiny_dir, name="other", normalize_on_device=False))
        assert dict(os.environ) == environment
        assert engine.normalizes_on_device and not other.normalizes_on_device
        wanted = await engine.generate_batch(prompts.requests(range(8)))
        found = await other.generate_batch(prompts.requests(range(8)))
        for group, wanted_group in zip(found, wanted, strict=True):
            for sampled, wanted_sample in zip(group, wanted_group, strict=True):
                assert sampled.token_ids == wanted_sample.token_ids
                assert sampled.logprobs == pytest.approx(wanted_sample.logprobs, abs=1e-5)
        task = asyncio.create_task(other.generate(prompts.request(1, max_tokens=1500)))
        while not other.num_in_flight:
            await asyncio.sleep(0)
        await other.shutdown()
        with pytest.raises(EngineError, match="gave up a group of 4: it was shut down"):
            await task
        with pytest.raises(EngineError, match="engine other is unusable: it was shut down"):
            await other.generate(prompts.request(1))
        await other.shutdown()

    run(other_engine())
    assert leftovers() == set()
    assert len(run(engine.generate(prompts.request(1)))) == 4


@pytest.mark.endings
def test_a_start_that_fails_says_so_and_leaves_nothing_behind(
    tiny_dir: Path, run: Run, tmp_path: Path, leftovers: Callable[[], set[object]]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_dir, folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineError, match="engine broken did not start"):
        run(VllmEngine.start(engine_config(folder, name="broken")))
    assert leftovers() == set()


@pytest.mark.parametrize(
    "after_s", [0.3, 2.5, *(pytest.param(after_s, marks=pytest.mark.endings) for after_s in (0.0, 1.0))]
)
def test_a_start_that_is_cancelled_leaves_nothing_behind(
    after_s: float, tiny_dir: Path, run: Run, leftovers: Callable[[], set[object]]
) -> None:
    environment = {**vllm_environment._DEFAULTS, **os.environ}
    if after_s:  # a start that never began removes nothing
        of_a_killed_engine = Path(tempfile.gettempdir()) / "yatt-engine-killed"
        of_a_killed_engine.mkdir()
        (of_a_killed_engine / LOCK_FILE).touch()  # which no process holds

    async def cancelled_start() -> None:
        start = asyncio.create_task(VllmEngine.start(engine_config(tiny_dir, name="cancelled")))
        await asyncio.wait([start], timeout=after_s)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(cancelled_start())
    assert leftovers() == set()
    assert dict(os.environ) == environment


def test_what_vllm_starts_has_a_main_module_of_its_own_and_other_processes_keep_theirs(tmp_path: Path) -> None:
    def main_of_a_process() -> dict[str, Any]:
        told = spawn.get_preparation_data("a process")
        return {name: value for name, value in told.items() if name.startswith("init_main")}

    before = main_of_a_process()
    with vllm_environment.spawning(num_threads=1, tmp_dir=str(tmp_path)):
        assert main_of_a_process() == {"init_main_from_name": "yatt_mm.rollout.core_main"} != before
    assert main_of_a_process() == before


def test_a_launch_that_begins_after_its_end_starts_nothing(
    tiny_dir: Path, leftovers: Callable[[], set[object]]
) -> None:
    launched = EngineProcess()
    launched.end(1.0)
    with pytest.raises(RuntimeError, match="was given up"):
        launched.launch(engine_config(tiny_dir))
    assert leftovers() == set()


def test_an_engine_whose_process_dies_or_whose_update_fails_is_named_and_leaves_nothing_behind(
    prompts: Prompts,
    tiny_dir: Path,
    run: Run,
    tmp_path: Path,
    leftovers: Callable[[], set[object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = load_file(tiny_dir / "model.safetensors")
    write_segment(tmp_path / "wrong", [(name, torch.zeros(3)) for name in weights], version=1)

    async def fail_and_die() -> None:
        dying = await VllmEngine.start(engine_config(tiny_dir, name="dying"))
        with pytest.raises(EngineError, match="engine dying failed its update to version 1"):
            await dying.update_weights(Published(version=1, path=str(tmp_path / "wrong")))
        with pytest.raises(EngineError, match="engine dying is unusable: its update to version 1 failed"):
            await dying.generate(prompts.request(1))
        dying._health.failure = None
        send = dying._flights.send

        async def send_and_kill(*arguments: Any) -> None:
            await send(*arguments)
            for process in dying._launched.processes:
                process.kill()
            await asyncio.sleep(60)  # its end is noticed while the core is paused, which never replies again

        monkeypatch.setattr(dying._flights, "send", send_and_kill)
        with pytest.raises(EngineError, match=r"engine dying gave up a batch of 1 groups: its process \d+ died"):
            async with asyncio.timeout(30):
                await dying.generate_batch([prompts.request(1, max_tokens=1500)])
        await dying.shutdown()

    run(fail_and_die())
    assert leftovers() == set()
