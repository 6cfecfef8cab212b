"""Shows surveys of data sets in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from yatt_mm.common.conversation import as_text
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.terminal import put
from yatt_mm.protocol.control import Prompt
from yatt_mm.survey.survey import Survey, percentiles

MAX_REASONS = 10
"""The number of reasons of which a table tells one by one."""


def show_survey(console: Console, survey: Survey, *, share: str) -> None:
    """Show what was seen of a set. `share`: what part of all prompts it gives, in words."""
    one = survey.found.run_set
    console.rule(escape(f"{survey.found.key}{share}"))
    console.print(
        escape(f"{one.num_samples} samples; layout of {one.layout}; reward {one.reward}"),
        highlight=False,
        soft_wrap=True,
    )
    seen = "all" if survey.num_seen == one.num_samples else f"{survey.num_seen} at random"
    left_out = [
        f"{num} {why}"
        for num, why in ((survey.num_filtered, "left out by data.filter"), (survey.num_unusable, "cannot be used"))
        if num
    ]
    console.print(f"looked at {seen}: {', '.join([f'{survey.num_usable} usable', *left_out])}", highlight=False)
    if survey.num_usable:
        console.print(_numbers(survey))
    if len(survey.reasons):
        console.print(_reasons(survey))
    for prompt in survey.first:
        _show_sample(console, prompt)


def _numbers(survey: Survey) -> Table:
    names = ("mean", "least", "median", "95 %", "most")
    table = Table("", *(Column(name, justify="right") for name in names), box=box.SIMPLE)
    for name, values in survey.measured.items():
        table.add_row(name, *map(_number, percentiles(values)))
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.1f}"


def _reasons(survey: Survey) -> Table:
    table = Table("left out because", Column("count", justify="right"), "the first", box=box.SIMPLE)
    ranked = survey.reasons.ranked()
    for reason, count in ranked[:MAX_REASONS]:
        table.add_row(escape(reason), str(count), escape(survey.examples[reason]))
    if rest := sum(count for _, count in ranked[MAX_REASONS:]):
        table.add_row(f"{len(ranked) - MAX_REASONS} more reasons", str(rest), "")
    return table


def _show_sample(console: Console, prompt: Prompt) -> None:
    console.print(f"[bold]sample {prompt.slot.index}[/]", highlight=False)
    for turn in prompt.conversation.turns:
        put(console, turn.role, as_text(turn.parts))
    put(console, "answer", prompt.answer)
    for ref in prompt.media:
        height, width = ref.meta["source_size"]
        frames = f", {len(ref.meta['frame_indices'])} frames" if kind_of(ref) == "video" else ""
        put(console, kind_of(ref), f"{width} x {height} pixels{frames}, {ref.meta['num_tokens']} tokens")
