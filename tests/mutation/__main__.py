"""Draws mutants at random, runs the tests on each, and tells which of them no test noticed.

    python -m tests.mutation --out mutants.jsonl                     # 300 mutants of the four areas: hours
    python -m tests.mutation --area storage --num 20 --seed 7 --out storage.jsonl
    python -m tests.mutation --again mutants.jsonl --out after.jsonl # the survivors of an earlier run once more
    python -m tests.mutation --named                                 # the changes of named*.py, each with its test
    python -m tests.mutation --named test_losses                     # those of tests with this text in their names

Every mutant is tried in a copy of the committed and uncommitted files of this repository. A mutant is *killed* if a
test of its area fails, or if the tests do not end in time. The others *survive*: a test is missing, or the change makes
no difference. Interrupted runs go on where they ended: mutants that are in `--out` already are not tried again.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from tests.mutation.all_named import ALL_NAMED
from tests.mutation.areas import AREAS, Stages
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
LONGEST_S = 600.0
"""The time in seconds after which the tests of a mutant are ended, and the mutant counts as killed."""
MISSING = ("ERROR: not found: ", "ERROR: file or directory not found: ")
"""How pytest tells that a test does not exist. Its status is the same as that of a module that cannot be imported."""
REASON_COLUMNS = "400"
"""The width in which pytest names a test that fails, with the reason."""
INTERRUPT_S = 60.0
"""The time in seconds that tests have to remove their files when they did not end in time."""
BESIDE_EACH_OTHER = "not (alone or elsewhere)"
"""The tests that `make test` runs beside each other, by their marks."""


def draw(areas: Sequence[str], num: int, seed: int) -> list[tuple[str, Mutant]]:
    """Return (area, mutant) for `num` mutants, divided over the areas by their shares."""
    whole = sum(AREAS[area].share for area in areas)
    drawn = []
    for area in areas:
        files = sorted({file for source in AREAS[area].sources for file in _python_files(ROOT / source)})
        every = [mutant for file in files for mutant in mutants_of(file, ROOT)]
        wanted = min(len(every), round(num * AREAS[area].share / whole))
        drawn += [(area, mutant) for mutant in random.Random(f"{seed} {area}").sample(every, wanted)]
    return drawn


def _python_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(source.rglob("*.py"))


def survivors(path: Path) -> list[tuple[str, Mutant]]:
    """Return (area, mutant) of the mutants that survived in an earlier run."""
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if not record["killed_by"]:
            found.append((record["area"], Mutant(**{name: record[name] for name in Mutant.__dataclass_fields__})))
    return found


def killed_by(copy: Path, stages: Stages, mutant: Mutant) -> str:
    """Return the first test that fails in a copy of the repository with this mutant, or "" if it survives."""
    file = copy / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.apply(source))
    end = time.monotonic() + LONGEST_S
    try:
        for tests in stages:
            if name := _failure(copy, tests, end - time.monotonic()):
                return name
        return ""
    finally:
        file.write_bytes(source)


def _failure(
    copy: Path, tests: Sequence[str], limit_s: float, *, marked: str = BESIDE_EACH_OTHER, test_limit_s: float = 300.0
) -> str:
    """Return the name of the first test that fails, and why, "time" if the tests do not end, or "" if all pass.
    A test that takes longer than `test_limit_s` fails.

    Raises ValueError if there are no such tests.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    command += [f"--timeout={test_limit_s:g}", "-m", marked]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "", "COLUMNS": REASON_COLUMNS}
    with tempfile.TemporaryDirectory(prefix="yt-", ignore_cleanup_errors=True) as temporary:
        command.append(f"--basetemp={temporary}/tests")  # one folder more in TMPDIR, and Ray's sockets find no room
        log = Path(temporary) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *tests], cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(INTERRUPT_S)
                return "time"
            finally:
                _end(process)
        if status == 0:
            return ""
        lines = log.read_text(errors="replace").splitlines()
        if status == pytest.ExitCode.NO_TESTS_COLLECTED or any(line.startswith(MISSING) for line in lines):
            raise ValueError(f"pytest ran none of {', '.join(tests)}: {' '.join(lines[-3:])}")
        failures = [line for line in lines if line.startswith(("FAILED ", "ERROR tests"))]
        return (failures or [f"pytest ended with status {status}"])[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what the tests have left in their session, by the handles of the processes."""
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid:
                other.send_signal(signal.SIGKILL)
        except (psutil.Error, OSError):
            continue
    process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", action="append", choices=AREAS, help="an area; all four if none is named")
    parser.add_argument("--num", type=int, default=300, help="how many mutants to draw (300)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the draw (0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants to try at a time (1)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="try the survivors in FILE instead of new mutants")
    parser.add_argument("--named", nargs="?", const="", metavar="TEXT", help="try named*.py (tests with this text)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write a line for each mutant")
    options = parser.parse_args(arguments)
    if options.named is not None:
        return try_named(options.named)
    if options.out is None:
        parser.error("--out is missing: name a file for the results")
    areas = options.area or list(AREAS)
    if options.again:
        drawn = [(area, mutant) for area, mutant in survivors(options.again) if area in areas]
    else:
        drawn = draw(areas, options.num, options.seed)
    done = options.out.read_text().splitlines() if options.out.exists() else []
    known = {(record["path"], record["start"], record["after"]) for record in map(json.loads, done)}
    missing = [(area, mutant) for area, mutant in drawn if (mutant.path, mutant.start, mutant.after) not in known]
    with options.out.open("a") as out:
        for number, record in enumerate(_try_all(missing, options.jobs), len(drawn) - len(missing) + 1):
            out.write(json.dumps(record) + "\n")
            out.flush()
            what = f"{record['path']}:{record['line']}: {record['before']!r} -> {record['after']!r}"
            print(f"{number}/{len(drawn)} {record['seconds']:4.0f} s  {record['killed_by'] or 'SURVIVED'}  {what}")
    print(table(options.out))
    return 0


def try_named(text: str) -> int:
    """Try the changes of `named*.py` whose test has this text in its name. The tests first run without a change, those
    of one file together.

    Prints a line for each change, and below it why the test failed: a test may be red for another reason than the one
    that it is named for. Returns 1 if a test stays green, does not end, or fails without the change too.
    """
    every = [named for named in ALL_NAMED if text in named.test]
    status, unchanged = 0, dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="yatt-mutants-") as folder:
        copy = _copy(Path(folder) / "copy")
        for named in every:
            place = named.test.partition("::")[0]
            if place not in unchanged:
                unchanged[place] = _of_named(copy, {one.test for one in every if one.test.startswith(place)})
            verdict, failure = "RED WITHOUT IT", unchanged[place]
            if not failure:
                file = copy / named.path
                source = file.read_text()
                if source.count(named.before) != 1:
                    raise ValueError(f"{named.path} has {source.count(named.before)} times, not once: {named.before!r}")
                file.write_text(source.replace(named.before, named.after))
                failure = _of_named(copy, {named.test})
                file.write_text(source)
                verdict = {"": "STILL GREEN", "time": f"NO END IN {LONGEST_S:g} s"}.get(failure, "red")
            status |= verdict != "red"
            change = f"`{named.before.strip()}` becomes `{named.after.strip()}`"
            print(f"| {named.claim} | {verdict} | {named.path}: {change} |\n  {failure}", flush=True)
    return status


def _of_named(copy: Path, tests: Set[str]) -> str:
    """Return `_failure` of tests in one file. A whole file counts without what only `make parity` runs."""
    marked = "" if all("::" in test for test in tests) else "not parity"
    return _failure(copy, sorted(tests), LONGEST_S, marked=marked, test_limit_s=2 * LONGEST_S)


def _try_all(drawn: Sequence[tuple[str, Mutant]], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each mutant, as it is done."""
    copies: SimpleQueue[Path] = SimpleQueue()
    results: SimpleQueue[dict[str, Any] | BaseException] = SimpleQueue()

    def attempt(area: str, mutant: Mutant) -> None:
        copy, start = copies.get(), time.monotonic()
        try:
            line = mutant.line((copy / mutant.path).read_bytes())
            killer = killed_by(copy, AREAS[area].stages(mutant.path), mutant)
            seconds = round(time.monotonic() - start, 1)
            results.put({"area": area, **asdict(mutant), "line": line, "killed_by": killer, "seconds": seconds})
        except BaseException as error:
            results.put(error)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="yatt-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copies.put(_copy(Path(folder) / str(number)))
        for area, mutant in drawn:
            pool.submit(attempt, area, mutant)
        for _ in drawn:
            result = results.get()
            if isinstance(result, BaseException):
                pool.shutdown(cancel_futures=True)
                raise result
            yield result


def _copy(target: Path) -> Path:
    """Copy the files that git knows or would add into a new folder, with compiled files that Python compares with
    their sources by content: a changed file may have the time and size of the one before."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    compileall.compile_dir(target, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return target


def table(path: Path) -> str:
    """Return the share of killed mutants in each area, as Markdown."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = ["| area | mutants | killed | share |", "|---|---|---|---|"]
    for area in [*AREAS, "all"]:
        ours = [record for record in records if area in ("all", record["area"])]
        killed = sum(bool(record["killed_by"]) for record in ours)
        if ours:
            lines.append(f"| {area} | {len(ours)} | {killed} | {killed / len(ours):.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
