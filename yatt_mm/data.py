"""The command `python -m yatt_mm.data CONFIG [key=value ...]`, which shows what a run would find in its data sets.

It starts the data plane and nothing else: no engine, no training. This module only reads the command line;
`yatt_mm.survey` looks at the sets.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLES = """examples:
  python -m yatt_mm.data configs/digits_cpu.yaml
  python -m yatt_mm.data configs/digits_cpu.yaml data.train=mine/train.jsonl data.eval=mine/eval.jsonl --first 5
  python -m yatt_mm.data configs/digits_cpu.yaml --samples all --histograms /tmp/digits.png
  python -m yatt_mm.data configs/digits_cpu.yaml data.filter.max_prompt_tokens=500 data.filter.min_pixels=784

The config is that of a run. Of its model only the tokenizer, the chat template and the processor are read.
"""
DEFAULT_SAMPLES = 1000


def main(arguments: list[str] | None = None, *, prog: str = "python -m yatt_mm.data") -> int:
    """Run the command line and return the exit status.

    0: success; 1: a part failed; 2: the config is wrong, or a run would refuse a set; 130: interrupted. `arguments`:
    None reads `sys.argv`. `prog`: the name of the command in its help.
    """
    from yatt_mm.runtime.command_line import status_of

    return status_of(lambda: _look(arguments, prog), stopped="the data plane")


def _look(arguments: list[str] | None, prog: str) -> None:
    options = _parser(prog).parse_intermixed_args(arguments)

    from yatt_mm.config.run_config import load_config
    from yatt_mm.survey.look import look

    config = load_config(options.config, options.overrides)
    look(config, num_samples=options.samples, num_first=options.first, histograms=options.histograms)


def _parser(prog: str) -> argparse.ArgumentParser:
    from yatt_mm.runtime.command_line import config_parser

    parser = config_parser(
        prog,
        description="Show what a run would find in its data sets: numbers, lengths, and what is left out and why.",
        examples=EXAMPLES,
        override="data.train=mine/train.jsonl",
    )
    parser.add_argument(
        "--samples",
        type=_count_or_all,
        default=DEFAULT_SAMPLES,
        metavar="N",
        help=f"the most samples of each set to look at, or all (default: {DEFAULT_SAMPLES}, at random)",
    )
    parser.add_argument("--first", type=int, default=2, metavar="N", help="the samples of each set to show (2)")
    parser.add_argument(
        "--histograms", type=Path, metavar="FILE", help="write a picture (png, pdf, svg); needs matplotlib"
    )
    return parser


def _count_or_all(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a whole number of at least 1, or all")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
