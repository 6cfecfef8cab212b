"""What a run says of itself on the console, at its start and at its end."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.config.run_config import Config
from yatt_mm.reporting.report import METRICS_FILE, QUARANTINE_FILE, Reporter
from yatt_mm.runtime import run_dir
from yatt_mm.runtime.start_point import StartPoint


def plan_of(config: Config, point: StartPoint) -> str:
    """Return what the run is going to do: its model, sets, processes and steps."""
    parallel, start = config.parallel(), point.start
    pools = {"vLLM engines": config.engines} | {f"of judge {name}": judge for name, judge in config.judges.items()}
    engines = ", ".join(f"{pool.num} {name}{f' (tp {pool.tp})' if pool.tp > 1 else ''}" for name, pool in pools.items())
    num_train, num_held_out = (sum(one.num_samples for one in sets) for sets in (start.train_sets, start.eval_sets))
    sets = "".join(f"  {escape(line)}\n" for line in point.sets)
    if not config.trains:
        return f"{config.model.path}: {num_held_out} held-out samples; {engines}\n{sets}".rstrip()
    return (
        f"[bold]{config.run.name}[/]: {config.model.path}; {num_train} training samples and {num_held_out} "
        f"held-out samples\n{sets}"
        f"  {config.controllers.num} controllers, {config.placement.num_devices} devices, "
        f"{config.placement.mode}: {engines} and {parallel.world_size} Megatron ranks "
        f"(tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}, dp {parallel.dp})\n"
        f"  steps {start.step + 1} to {config.train.steps}, {config.train.prompts_per_step} prompts x "
        f"{config.rollout.group_size} samples each"
    )


def summarise(config: Config, reporter: Reporter, seconds: float, console: Console) -> None:
    """Say what a run that came to its last step has reached, and where its results are."""
    first, last = min(reporter.accuracies, default=None), max(reporter.accuracies, default=None)
    if first is not None and last is not None:
        console.print(
            f"held-out accuracy: {reporter.accuracies[first]:.3f} at step {first}, "
            f"{reporter.accuracies[last]:.3f} at step {last}",
            highlight=False,
            soft_wrap=True,
        )
    if reporter.last.get("best/step"):
        console.print(
            f"best {config.eval.keep_best}: {reporter.last['best/value']:.3f} at step "
            f"{reporter.last['best/step']:.0f}; model in {config.run_dir / run_dir.BEST_DIR}",
            highlight=False,
            soft_wrap=True,
        )
    elif config.eval.keep_best and "best/step" in reporter.last:
        console.print(
            f"best {config.eval.keep_best}: {reporter.last['best/value']:.3f} at step 0, before training; no model is "
            "kept for it",
            highlight=False,
            soft_wrap=True,
        )
    tell_left_out(config, reporter, console)
    console.print(
        f"done in {seconds:.0f} s; model in {config.run_dir / run_dir.EXPORT_DIR}, "
        f"metrics in {config.run_dir / METRICS_FILE} (tensorboard --logdir {config.run_dir})",
        highlight=False,
        soft_wrap=True,
    )


def table_of(metrics: Mapping[str, float]) -> Table:
    """Return the metrics of an evaluation, one line each."""
    table = Table("metric", Column("value", justify="right"), box=box.SIMPLE)
    for name, value in metrics.items():
        table.add_row(escape(name), f"{value:.0f}" if name.rpartition("/")[2].startswith("num_") else f"{value:.4f}")
    return table


def tell_left_out(config: Config, reporter: Reporter, console: Console) -> None:
    """Say how many samples were left out, and how many responses have no score."""
    if reporter.num_quarantined or reporter.num_filtered:
        by_filter = f", {reporter.num_filtered} of them by data.filter" if reporter.num_filtered else ""
        num = reporter.num_quarantined + reporter.num_filtered
        console.print(
            f"[yellow]{num} {'sample was' if num == 1 else 'samples were'} left out[/]{by_filter}; "
            f"{config.run_dir / QUARANTINE_FILE} says why",
            highlight=False,
            soft_wrap=True,
        )
    if reporter.num_without_score:
        console.print(
            f"[yellow]{reporter.num_without_score} scores could not be given[/] by the reward function and the judges; "
            "the lines with 'no score' say why",
            highlight=False,
            soft_wrap=True,
        )


def tell_what_is_saved(config: Config, console: Console) -> None:
    """Say, after an interruption, where the run can go on."""
    steps = Checkpoints.of_run(config.run_dir, keep=config.checkpoint.keep).steps()
    saved = f"--resume goes on after step {steps[-1]}" if steps else "no checkpoint was saved yet"
    console.print(f"{config.run_dir}: {saved}", highlight=False, soft_wrap=True)
