"""The command `python -m yatt_mm.evaluate CONFIG [key=value ...]`, which measures a model on held-out sets.

This module only reads the command line. `yatt_mm.runtime.launch` starts the processes and stops them again.
"""

from __future__ import annotations

import argparse
import sys

EXAMPLES = """examples:
  python -m yatt_mm.evaluate configs/digits_cpu.yaml
  python -m yatt_mm.evaluate configs/digits_cpu.yaml model.path=runs/digits_cpu/hf
  python -m yatt_mm.evaluate configs/digits_cpu.yaml data.eval=null \\
      'eval.sets={scans: {path: examples/digits/data/eval-*.tar, num_samples: 8, temperature: 1, metrics: [pass@8]}}'

The config is that of a run; its training sets are not read. Results are in evaluations/ of the run's folder.
"""


def main(arguments: list[str] | None = None, *, prog: str = "python -m yatt_mm.evaluate") -> int:
    """Run the command line and return the exit status.

    0: success; 1: a part failed; 2: the config is wrong; 130: interrupted. `arguments`: None reads
    `sys.argv`. `prog`: the name of the command in its help.
    """
    from yatt_mm.runtime.command_line import status_of

    return status_of(lambda: _evaluate(arguments, prog), stopped="everything that was started")


def _evaluate(arguments: list[str] | None, prog: str) -> None:
    options = _parser(prog).parse_intermixed_args(arguments)

    from yatt_mm.config.run_config import load_config
    from yatt_mm.runtime.launch import evaluate

    evaluate(load_config(options.config, options.overrides))


def _parser(prog: str) -> argparse.ArgumentParser:
    from yatt_mm.runtime.command_line import config_parser

    return config_parser(
        prog,
        description="Measure a vision-language model on held-out sets.",
        examples=EXAMPLES,
        override="model.path=runs/mine/hf",
    )


if __name__ == "__main__":
    sys.exit(main())
