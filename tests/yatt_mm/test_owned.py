"""A run that was killed leaves folders; the next run of the same user removes exactly those."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from yatt_mm.owned import owned_folder, remove_orphans

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from pathlib import Path
from yatt_mm.owned import owned_folder
with owned_folder(Path(sys.argv[1]), "yatt-") as folder:
    (folder / "policy-1").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(60)
"""


def start_owner(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def end(owner: "subprocess.Popen[str]") -> None:
    owner.kill()
    owner.wait()
    owner.stdout.close()  # type: ignore[union-attr]


def test_what_a_killed_owner_left_is_removed_by_the_next_and_what_is_alive_stays(tmp_path: Path) -> None:
    killed, orphan = start_owner(tmp_path)
    living, kept = start_owner(tmp_path)
    foreign = tmp_path / "yatt-of-somebody"
    foreign.mkdir()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (orphan / "policy-1").exists()
        with owned_folder(tmp_path, "yatt-") as mine:
            assert not orphan.exists()
            assert (kept / "policy-1").exists() and foreign.exists() and mine.exists()
            assert remove_orphans(tmp_path, "yatt-") == []
        assert not mine.exists() and kept.exists()
    finally:
        end(killed)
        end(living)
    assert remove_orphans(tmp_path, "yatt-") == [kept]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / ".owner").touch()
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "yatt-link").symlink_to(target)
    assert remove_orphans(runs, "yatt-") == []
    assert (target / ".owner").exists()
