"""A launcher that is killed, or lost, as often as its arguments say. The real one is in the whole runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.runtime.supervised import LIFELINE
from yatt_mm.runtime.supervisor import LOST


def main(folder: Path, kills: list[str], resume: list[str]) -> int:
    """Play one life: the next one of `kills`, or a life that comes to its end."""
    assert LIFELINE.take_order()
    lives = folder / "lives.jsonl"
    number = len(lives.read_text().splitlines()) if lives.exists() else 0
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    loss = LIFELINE.loss
    life = {"resume": resume, "left": left.pid, "started_s": LIFELINE.started_s}
    life |= {"loss": loss and loss.why, "at": loss and [loss.phase, loss.step]}
    with lives.open("a") as file:
        file.write(json.dumps(life) + "\n")
    way = kills[number] if number < len(kills) else "end"
    if way != "early":
        phase = {"refused": "start", "exports": "export"}.get(way, "train")
        began_at, step = 0 if resume else -1, number if "moves" in kills else 0
        LIFELINE.tell(run_dir=str(folder), max_restarts=2, began_at=began_at, step=step, phase=phase)
    if way == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_ended(left, 75)))
        (folder / "waits").touch()
        time.sleep(600)
    if way == "shares":  # it is killed with a folder of its own, as all hosts see one
        with owned_folder(folder, ".run.hosts-") as shared:
            LIFELINE.tell(owned=(str(shared),))
            os.kill(os.getpid(), signal.SIGKILL)
    if way in ("kill", "early", "moves", "exports"):
        os.kill(os.getpid(), signal.SIGKILL)
    if way in ("lost", "grows"):
        LIFELINE.tell(lost="the rendezvous was lost", is_fault=way == "lost")
        return _ended(left, LOST)
    if way == "crashes":  # when it has come to its end
        _ended(left, 75)
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "refused":  # as if hosts were missing
        return _ended(left, 1)
    return _ended(left, int(way) if way.isdigit() else 0)


def _ended(left: subprocess.Popen[bytes], status: int) -> int:
    left.kill()
    left.wait()
    LIFELINE.tell(status=status)
    return status


if __name__ == "__main__":
    sys.exit(
        main(Path(sys.argv[1]), [a for a in sys.argv[2:] if a[0] != "-"], [a for a in sys.argv[2:] if a[0] == "-"])
    )
