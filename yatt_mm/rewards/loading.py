"""Loads the reward function that the config names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from yatt_mm.common.errors import ConfigError

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]


def load_reward_function(path: str) -> RewardFunction:
    """Return the function behind `module:name`.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take three arguments.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"reward.function is {path!r}; wanted module:name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"reward.function is {path!r}: cannot import {module_name}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ConfigError(f"reward.function is {path!r}: {module_name} has no function {name}; it has {found}")
    try:
        inspect.signature(function).bind("response", "answer", {})
    except TypeError as error:
        raise ConfigError(f"reward.function is {path!r}: it must take (response, answer, fields); {error}") from error
    return function
