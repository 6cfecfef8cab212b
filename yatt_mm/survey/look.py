"""Looks at the data sets of a config: it starts the run's data plane alone, and shows what a run would find."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dataplane.client.client import Client
from models.recipes.media_recipes import MediaRecipes, load_recipes
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompt_check import prompt_template_of
from yatt_mm.hosts.run_node import node_settings, node_token, start_node
from yatt_mm.preflight.first_samples import check_first_samples
from yatt_mm.preflight.hub import with_local_paths
from yatt_mm.preflight.overlap import overlaps
from yatt_mm.preflight.run_checks import check_data
from yatt_mm.preflight.run_sets import FoundSet, find_held_out_set, find_train_set, held_out_sections
from yatt_mm.survey.histograms import check_picture, draw_histograms
from yatt_mm.survey.survey import Survey, survey_set
from yatt_mm.survey.tables import show_survey


def look(
    config: Config,
    *,
    num_samples: int | None,
    num_first: int,
    histograms: Path | None = None,
    console: Console | None = None,
) -> list[Survey]:
    """Show the sets of a config, and return what was seen. `num_samples`: the most samples of each set; None takes all.
    `num_first`: the samples of each set that are shown. `histograms`: a picture to write.

    Raises:
        ConfigError: a set cannot be read, or, after all sets were shown, a run of this config would refuse one.
    """
    if histograms is not None:
        check_picture(histograms)
    fails_on_bad = config.data.on_bad_media == "fail"
    console = console or Console()
    data = config.data.model_copy(update={"on_bad_media": "quarantine"})
    config = with_local_paths(config.model_copy(update={"data": data}), console, with_weights=False)
    check_data(config)
    recipes = load_recipes(Path(config.model.path), config.data.video.sampling())
    surveys: list[Survey] = []
    refusals: list[str] = []
    with ExitStack() as stack:
        scratch = stack.enter_context(owned_folder(Path(tempfile.gettempdir()), "yatt-"))
        run_id, settings = f"look-{secrets.token_hex(4)}", None
        if config.dataplane.uri is None:
            token_file = stack.enter_context(node_token(scratch))
            settings = node_settings(config, run_id, scratch=scratch, token_file=token_file)
        node = start_node(stack, config, settings, run_id, console)
        client = stack.enter_context(contextlib.closing(Client(node.uri, timeout_s=config.dataplane.timeout_s)))
        with console.status("reading the index of the sets"):
            sets = _find_sets(client, config, refusals)
        for found in sets:
            refusals += _refusal_of(client, config, recipes, found)
            survey = _survey(client, config, recipes, found, num_samples, num_first, console)
            surveys.append(survey)
            if fails_on_bad and (found.bad or survey.num_unusable):
                refusals.append(f"{found.key} has samples that cannot be used, and data.on_bad_media is fail")
            show_survey(console, survey, share=_share_of(config, found))
    for warning in overlaps(config):
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    if histograms is not None and surveys:
        draw_histograms(surveys, histograms)
        console.print(f"histograms in {histograms}", highlight=False, soft_wrap=True)
    if refusals:
        raise ConfigError("a run would not start: " + "; ".join(refusals))
    return surveys


def _find_sets(client: Client, config: Config, refusals: list[str]) -> list[FoundSet]:
    """Return the sets that can be read. Why a run would refuse the others is added to `refusals`."""
    found = []
    for find in (
        *(partial(find_train_set, client, config, one) for one in config.data.train),
        *(partial(find_held_out_set, client, config, *one) for one in held_out_sections(config).items()),
    ):
        try:
            found.append(find())
        except ConfigError as error:
            refusals.append(str(error))
    return found


def _refusal_of(client: Client, config: Config, recipes: MediaRecipes, found: FoundSet) -> list[str]:
    """Return why a run would refuse a set, if it would."""
    try:
        check_first_samples(client, config, recipes, found)
    except ConfigError as error:
        return [str(error)]
    return []


def _survey(
    client: Client,
    config: Config,
    recipes: MediaRecipes,
    found: FoundSet,
    num_samples: int | None,
    num_first: int,
    console: Console,
) -> Survey:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    num = found.run_set.num_samples if num_samples is None else min(num_samples, found.run_set.num_samples)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(escape(found.key), total=num)
        return survey_set(
            client,
            config,
            recipes,
            found,
            template=prompt_template_of(config),
            num_samples=num,
            num_first=num_first,
            advance=lambda step: progress.advance(task, step),
        )


def _share_of(config: Config, found: FoundSet) -> str:
    """Return in words which share of the prompts a training set gives, if there are several."""
    weights = {one.name: one.weight for one in config.data.train}
    if not found.is_trained or len(weights) == 1:
        return ""
    return f", {weights[found.run_set.name] / sum(weights.values()):.1%} of the prompts"
