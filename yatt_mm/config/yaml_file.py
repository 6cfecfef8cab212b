"""Reads YAML with dotted overrides into a tree of sections, and explains what is wrong with it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.values import Section
from yatt_mm.config.wanted import wanted

_ONLY_IN_EVALUATION = (
    "tokens would be sampled from a part of the distribution, and the trainer's log-probabilities are of the whole; "
    "evaluation takes it, as eval.sets.<name>."
)
REFUSED = {f"rollout.{name}": f"{_ONLY_IN_EVALUATION}{name}" for name in ("top_p", "top_k", "min_p")}
"""Keys that people look for, and why there are none."""


EXTENDS = "extends"
"""The key of a file over whose values its own are laid."""


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode) and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} stands there twice; write it once", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the plain tree of a YAML file, over that of the file that its key `extends` names, with
    `dotted.key=value` overrides applied.

    Raises:
        ConfigError: a file cannot be read or is not a mapping, files extend each other in a circle, or an override is
            not of the form `dotted.key=value`.
    """
    tree = _extended(Path(path), ())
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _extended(path: Path, by: tuple[Path, ...]) -> dict[str, Any]:
    """Return the tree of a file over that of the file that it extends. `by`: the files that extend this one."""
    if path.resolve() in by:
        raise ConfigError(f"{path} extends itself, by way of {by[-1]}; leave out {EXTENDS} in one of them")
    tree = _read_file(path)
    base = tree.pop(EXTENDS, None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {EXTENDS} is {base!r}; wanted the path of a config, from the folder of this one")
    below = path.parent / base
    if not below.is_file():
        raise ConfigError(f"{path}: {EXTENDS} is {base}, and there is no file {below}")
    return _over(_extended(below, (*by, path.resolve())), tree)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return the values of both trees; where both have one that is no section, that of the upper tree."""
    merged = dict(below)
    for key, value in above.items():
        found = below.get(key)
        if isinstance(found, dict) and (value is None or isinstance(value, dict)):
            merged[key] = _over(found, value or {})  # a section without a key of its own stays
        else:
            merged[key] = value
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}") from error
    try:
        tree = yaml.load(text, _UniqueKeys) or {}  # _UniqueKeys is a safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError comes from a date that does not exist, for example
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; wanted a mapping of sections")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"found the argument {override!r}; wanted dotted.key=value, such as run.seed=1")
    *sections, leaf = key.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key}: {section} is a value, not a section")
        tree = below
    try:
        tree[leaf] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{key}: {value!r} is not a YAML value: {error}. Put quotes around a text with braces, brackets or colons, "
            f"and quotes around those for the shell: {key}='\"...\"'; a section or a list needs the shell's alone: "
            f"{key}='{{name: value}}'"
        ) from error


def explain(problem: Any, root: type[Section]) -> str:
    """Return one line about a validation error of pydantic, with the key and the nearest known one."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if key in REFUSED:
        return f"{key} cannot be set: {REFUSED[key]}"
    if problem["type"] == "extra_forbidden":
        known = _all_keys(root)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == location[-1]]
        return f"{key} is not a known key; did you mean {(same_leaf or near)[0]}?"
    if problem["type"] == "missing":
        leaves = _required_below(root, location)
        if leaves:
            names = " and ".join(f"{key}.{leaf}" for leaf in leaves)
            return f"{names} {'is' if len(leaves) == 1 else 'are'} missing; add to the config or give as KEY=VALUE"
        is_in_a_list = any(part.isdigit() for part in location)
        return f"{key} is missing; add it to the config{'' if is_in_a_list else f' or give {key}=VALUE'}"
    words = wanted(problem)
    if not location:
        return words
    # a number that has a `source` key next to it
    return f"{key.removesuffix('.value').removesuffix('.[key]')} is {problem['input']!r}: {words}"


def section_inside(annotation: Any) -> tuple[type[Section], str] | None:
    """Return the class of the section that a field holds, or that each value of a field's mapping or list is; and the
    text that joins the field's key with the section's keys in dotted keys. None if the field holds no section."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, "."
    inside = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, Section)]
    return (inside[0], "[*]." if get_origin(annotation) is tuple else ".<name>.") if inside else None


def _required_below(root: type[Section], location: list[str]) -> list[str]:
    """Return the keys that a missing section must have; none if the place is no section."""
    field = root.model_fields.get(location[0]) if len(location) == 1 else None
    section = section_inside(field.annotation) if field is not None else None
    if section is None:
        return []
    return [name for name, inside in section[0].model_fields.items() if inside.is_required()]


def _all_keys(section: type[Section], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(f"{prefix}{name}")
        if (found := section_inside(field.annotation)) is not None:
            keys += _all_keys(found[0], f"{prefix}{name}{found[1]}")
    return keys
