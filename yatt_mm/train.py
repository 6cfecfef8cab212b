"""The command `python -m yatt_mm.train CONFIG [key=value ...]`, which trains a vision-language model.

This module only reads the command line. The training loop is in `yatt_mm.control.loop`; read it first.
`yatt_mm.runtime.launch` starts the processes of a run and stops them again, in a child of `yatt_mm.runtime.supervisor`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLES = """examples:
  python -m yatt_mm.train configs/digits_cpu.yaml
  python -m yatt_mm.train configs/digits_cpu.yaml run.name=tp2 train.parallel.tp=2
  python -m yatt_mm.train configs/digits_cpu.yaml --resume
  python -m yatt_mm.train configs/digits_cpu.yaml --resume runs/digits_cpu/checkpoints/step_000010
"""


def main(arguments: list[str] | None = None, *, prog: str = "python -m yatt_mm.train") -> int:
    """Run the command line and return the exit status.

    0: the run finished; 1: the run failed; 2: the config is wrong; 75: saved and stopped, start it again with
    `--resume`; 130: interrupted. `arguments`: None reads `sys.argv`. `prog`: the name of the command in its help.

    The run is in a child process, which `yatt_mm.runtime.supervisor` starts, again if it is lost.
    """
    from yatt_mm.runtime.supervised import LIFELINE
    from yatt_mm.runtime.supervisor import supervise

    is_launcher = LIFELINE.take_order()
    options = _parser(prog).parse_intermixed_args(_with_resume_apart(sys.argv[1:] if arguments is None else arguments))
    if not is_launcher:
        return supervise([options.config, *options.overrides], options.resume)
    return _launch(options.config, options.overrides, options.resume)


def _launch(config: str, overrides: list[str], resume: str | None) -> int:
    from yatt_mm.runtime.command_line import status_of
    from yatt_mm.runtime.supervised import LIFELINE
    from yatt_mm.runtime.supervisor import LOST

    is_lost = False

    def launch_and_tell() -> None:
        nonlocal is_lost
        from yatt_mm.common.errors import RunGrows, RunLost
        from yatt_mm.config.run_config import load_config
        from yatt_mm.runtime.launch import launch

        try:
            launch(load_config(config, overrides), resume=resume)
        except RunLost as error:
            LIFELINE.tell(lost=str(error), is_fault=not isinstance(error, RunGrows))
            is_lost = True

    status = status_of(launch_and_tell, stopped="everything that this run started", loses_nothing=True)
    status = LOST if is_lost else status
    LIFELINE.tell(status=status)
    return status


def _with_resume_apart(arguments: list[str]) -> list[str]:
    """Return the arguments with `--resume=auto` where an override follows `--resume`, which is no folder."""
    return [
        "--resume=auto" if argument == "--resume" and "=" in after and not Path(after).exists() else argument
        for argument, after in zip(arguments, [*arguments[1:], ""])
    ]


def _parser(prog: str) -> argparse.ArgumentParser:
    from yatt_mm.runtime.command_line import config_parser

    parser = config_parser(
        prog,
        description="Train a vision-language model with reinforcement learning.",
        examples=EXAMPLES,
        override="train.steps=20",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="DIR|auto",
        help="continue from a checkpoint folder, or from the newest one of the run; begin where the run has none yet",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
