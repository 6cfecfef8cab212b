"""The command `python -m yatt_mm.simulate CONFIG ... [key=value ...]`, which compares layouts of the same devices.

The simulation is one of discrete events. It uses the trainer's own placement policy, sampling rule and balance of
updates. The speeds of engines and training are numbers in the config, each with its source. docs/simulator.md
describes what is modelled. This module only reads the command line and prints; `yatt_mm.simulator` simulates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from yatt_mm.common.errors import ConfigError, YattError
from yatt_mm.simulator.config import SimulationConfig, load_simulation
from yatt_mm.simulator.gantt import draw
from yatt_mm.simulator.layouts import NAMES, compare
from yatt_mm.simulator.report import as_object, as_table, assumed_keys, conclusion
from yatt_mm.simulator.results import LayoutResult

WIDTH_OF_FILES = 140
"""The width in characters of a table that is written to a file or a pipe: wide enough that no table cell is cut or
wrapped."""
EXAMPLES = """examples:
  python -m yatt_mm.simulate configs/simulate/yatt_paper.yaml
  python -m yatt_mm.simulate configs/simulate/yatt_paper.yaml --gantt /tmp/yatt.png workload.verdict.median=100
  python -m yatt_mm.simulate configs/simulate/yatt_paper.yaml configs/simulate/drift.yaml genrm.wake_s=5
  python -m yatt_mm.simulate configs/simulate/drift.yaml --decisions
  python -m yatt_mm.simulate configs/simulate/scale_4096.yaml --json
"""


def main(arguments: list[str] | None = None, *, prog: str = "python -m yatt_mm.simulate") -> int:
    """Run the command line and return the exit status.

    0: success; 2: a config is wrong or too large; 130: interrupted. `arguments`: None reads `sys.argv`. `prog`: the
    name of the command in its help.
    """
    options = _parser(prog).parse_intermixed_args(arguments)
    paths = [argument for argument in options.arguments if "=" not in argument or argument.endswith((".yaml", ".yml"))]
    overrides = [argument for argument in options.arguments if argument not in paths]
    where = ""
    try:
        _check_number(paths, options)
        configs = []
        for path in paths:
            where = f"{path}: " if len(paths) > 1 else ""
            configs.append(load_simulation(path, overrides))
        for path, config in zip(paths, configs):
            where = f"{path}: " if len(paths) > 1 else ""
            _simulate(path, config, options)
    except YattError as error:
        print(f"error: {where}{error}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"error: {where}a simulation of this size does not fit into memory", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _check_number(paths: list[str], options: argparse.Namespace) -> None:
    if not paths:
        raise ConfigError("no config is given; give a YAML file, for example configs/simulate/yatt_paper.yaml")
    for name, is_given in (("--json", options.json), ("--gantt", options.gantt)):
        if is_given and len(paths) > 1:
            raise ConfigError(f"{name} takes one config, but {len(paths)} are given: {', '.join(paths)}")


def _simulate(path: str, config: SimulationConfig, options: argparse.Namespace) -> None:
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    started = time.perf_counter()
    results = _run(config, console)
    seconds = time.perf_counter() - started
    if options.gantt:
        draw(results, options.gantt)
    title = f"{path}: {config.devices.num} devices, {config.run.steps} steps, simulated in {seconds:.1f} s"
    _show(config, results, title, options.decisions, console)
    if options.json:
        print(json.dumps(as_object(results)))


def _run(config: SimulationConfig, console: Console) -> list[LayoutResult]:
    results: list[LayoutResult] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(NAMES[0], total=None)
        for result in compare(config):
            results.append(result)
            progress.update(task, description=NAMES[min(len(results), len(NAMES) - 1)])
    return results


def _show(
    config: SimulationConfig, results: list[LayoutResult], title: str, with_decisions: bool, console: Console
) -> None:
    console.print(as_table(results, title))
    if missing := set(NAMES) - {result.name for result in results}:
        console.print(
            f"left out, because there are only {config.num_cells} cells: {', '.join(missing)}", highlight=False
        )
    console.print(conclusion(results), highlight=False, soft_wrap=True)
    if with_decisions:
        for decision in (line for result in results for line in result.decisions):
            console.print(decision, highlight=False)
    assumed = assumed_keys(config)
    if assumed:
        console.print(f"assumed, not measured or published: {', '.join(assumed)}", highlight=False)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Simulate training steps in seven layouts of the same devices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="CONFIG | key=value",
        help="YAML files of simulations (see configs/simulate/ and docs/simulator.md), one table each; "
        "dotted overrides that apply to all of them, for example genrm.wake_s=5",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; the table goes to stderr")
    parser.add_argument("--gantt", metavar="FILE", help="write a picture (png, pdf, svg); needs matplotlib")
    parser.add_argument("--decisions", action="store_true", help="print what the placement policy decided, and why")
    return parser


if __name__ == "__main__":
    sys.exit(main())
