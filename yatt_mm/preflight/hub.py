"""Names of the Hugging Face hub in a config: models and data sets that are downloaded, or found in the hub's cache.

A name is `owner/name`, or `owner/name@revision`; of a data set also `owner/name:split`. What is in the cache is not
downloaded again. Without a network, or with HF_HUB_OFFLINE=1, the cache alone is used.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.eval_section import held_out_key_of
from yatt_mm.config.run_config import Config
from yatt_mm.preflight.run_sets import key_of
from yatt_mm.protocol.control import HELD_OUT

_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w.-]+))?")
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""The files of a model that a run reads, besides its weights."""
WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name of the hub, in its parts."""

    name: str
    revision: str | None
    split: str | None


def hub_name_of(text: str) -> HubName | None:
    """Return the parts of a name of the hub; None if the text is something else, or names files that are here."""
    path = text.partition("#")[0]
    found = _NAME.fullmatch(path)
    if found is None or Path(path).exists() or glob.glob(path) or Path(path).parent.is_dir():
        return None
    return HubName(name=found["name"], revision=found["revision"], split=found["split"])


def with_local_paths(config: Config, console: Console, *, with_weights: bool = True) -> Config:
    """Return the config with the folders of models and data sets in the place of their names on the hub. Downloads
    what is not in the cache. `with_weights`: False leaves out weights, and the judges' models.

    Raises:
        ConfigError: one of them can be neither downloaded nor found in the cache.
    """
    files = [*MODEL_FILES, WEIGHTS] if with_weights else [*MODEL_FILES]
    model = config.model.model_copy(update={"path": _model("model.path", config.model.path, console, files)})
    reference = config.reference
    if reference.path is not None and config.references is not None and with_weights:
        path = _model("reference.path", reference.path, console, files)
        reference = reference.model_copy(update={"path": path})
    critic = config.critic
    if critic.path is not None and config.critic_path is not None and with_weights:
        critic = critic.model_copy(update={"path": _model("critic.path", critic.path, console, files)})
    judges = {
        name: judge
        if judge.url is not None or not with_weights
        else judge.model_copy(update={"model": _model(f"reward.judges.{name}.model", judge.model, console, files)})
        for name, judge in config.reward.judges.items()
    }
    reward = config.reward.model_copy(update={"judges": judges})
    config = config.model_copy(update={"model": model, "reference": reference, "critic": critic, "reward": reward})
    return config if config.dataplane.uri is not None else _with_local_data(config, console)


def _with_local_data(config: Config, console: Console) -> Config:
    roots = list(config.data.media_roots)

    def local(key: str, text: str) -> str:
        name = hub_name_of(text)
        if name is None:
            return text
        folder = _folder(key, name, "dataset", console)
        roots.append(str(Path(folder).parents[1]))  # the files of a snapshot are links into the cache
        options = text[text.index("#") :] if "#" in text else ""
        return f"{folder}/**/{name.split}*{options}" if name.split is not None else f"{folder}{options}"

    train = tuple(one.model_copy(update={"path": local(key_of(one), one.path)}) for one in config.data.train)
    held_out = None if config.data.eval is None else local(held_out_key_of(HELD_OUT), config.data.eval)
    sets = {
        name: one.model_copy(update={"path": local(held_out_key_of(name), one.path)})
        for name, one in config.eval.sets.items()
    }
    data = config.data.model_copy(update={"train": train, "eval": held_out, "media_roots": roots})
    return config.model_copy(update={"data": data, "eval": config.eval.model_copy(update={"sets": sets})})


def _model(key: str, text: str, console: Console, files: list[str]) -> str:
    name = hub_name_of(text)
    if name is None or name.split is not None:
        return text
    return _folder(key, name, "model", console, allow_patterns=files)


def _folder(key: str, name: HubName, kind: Literal["model", "dataset"], console: Console, **options: Any) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    console.print(f"{key}: {name.name} of the Hugging Face hub", highlight=False, soft_wrap=True)
    try:
        return snapshot_download(name.name, repo_type=kind, revision=name.revision, **options)
    except GatedRepoError as error:
        why = f"it is gated: accept its terms on its page, and log in with hf auth login ({_first(error)})"
    except RepositoryNotFoundError as error:
        why = f"the hub has no such {kind}, or it is private: hf auth login ({_first(error)})"
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        why = f"it is not in the cache, and cannot be downloaded: {_first(error)}"
    raise ConfigError(
        f"{key} is {name.name}: there is no such folder, so it was looked for on the Hugging Face hub; {why}. Where "
        "there is no network, download it elsewhere "
        f"(hf download {name.name}{' --repo-type dataset' * (kind == 'dataset')}), and give the folder"
    )


def _first(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
