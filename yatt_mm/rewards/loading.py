"""Loads the reward function that the config names: from a module, or from a file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from yatt_mm.common.errors import ConfigError
from yatt_mm.rewards.form import form_of

RewardFunction = Callable[..., Any]

WANTED = "wanted path/to/file.py:name, or module:name of a module that can be imported"


@functools.cache
def load_reward_function(path: str) -> RewardFunction:
    """Return the function behind `file.py:name` or `module:name`. A file is run once per process.

    Raises:
        ConfigError: it cannot be loaded, is not a function, or takes what nothing is known about. The message begins
            with the path.
    """
    source, separator, name = path.rpartition(":")
    if not separator or not source or not name:
        raise ConfigError(f"{path!r}; {WANTED}")
    module = _load_file(path, Path(source)) if source.endswith(".py") else _import(path, source)
    function = vars(module).get(name)
    if not callable(function):
        found = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        )
        raise ConfigError(f"{path!r}: {source} has no function {name}; it has {found}")
    try:
        form_of(function)
    except ValueError as error:
        raise ConfigError(f"{path!r}: {error}") from error
    return function


def absolute(path: str) -> str:
    """Return the same function's path for a process with another working directory."""
    source, separator, name = path.rpartition(":")
    return f"{Path(source).absolute()}{separator}{name}" if source.endswith(".py") else path


def _load_file(path: str, file: Path) -> ModuleType:
    """Return the module in a file. What lies beside it can be imported there, as in a script."""
    if not file.is_file():
        raise ConfigError(f"{path!r}: there is no file {file.absolute()}; {WANTED}")
    spec = importlib.util.spec_from_file_location(file.stem, file.absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if (beside := str(file.absolute().parent)) not in sys.path:
        sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may end itself
        raise ConfigError(f"{path!r}: {file} raised {type(error).__name__}: {error}") from error
    return module


def _import(path: str, name: str) -> ModuleType:
    """Return a module, also one in the working directory, which an installed command does not look at by itself. Ray
    gives the search path to all workers."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path!r}: cannot import {name}: {error}. It is looked for in {Path.cwd()} and in PYTHONPATH; {WANTED}"
        ) from error
