"""Turns the JSON object of a recipe into the kernel that runs it, and says in words what is wrong with it."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields

from dataplane.core.errors import BadRequestError

S = TypeVar("S", bound=Struct)


def parse(kind: type[S], data: Mapping[str, Any]) -> S:
    """Return the recipe of this kind that `data` describes. Raises BadRequestError that names every field that is
    missing, unknown or out of range."""
    try:
        return convert(dict(data), kind)
    except ValidationError as error:
        problems = "; ".join(_problems(kind, data, "recipe")) or f"recipe is refused: {error}"
        raise BadRequestError(f"{problems}; docs/dataplane-media.md lists the fields of {data['kernel']}") from error


def _problems(kind: type[Struct], data: Mapping[str, Any], where: str) -> Iterator[str]:
    """Go through the fields one by one, because msgspec says what is wrong with the first one alone."""
    known = {field.encode_name: field for field in fields(kind)}
    for name, value in data.items():
        if name not in known and name != kind.__struct_config__.tag_field:
            yield f"{where}.{name} is {_short(value)}: there is no such field"
    for name, field in known.items():
        if name in data:
            yield from _problems_of(field.type, data[name], f"{where}.{name}")
        elif field.required:
            yield f"{where}.{name} is missing"


def _problems_of(kind: Any, value: Any, where: str) -> Iterator[str]:
    """Yield what is wrong with the value of one field."""
    try:
        convert(value, kind)
    except ValidationError as error:
        if get_origin(kind) is Literal:
            yield f"{where} is {_short(value)}; wanted one of {', '.join(map(str, get_args(kind)))}"
        elif inner := [
            problem for one in get_args(kind) if _is_meant(one, value) for problem in _problems(one, value, where)
        ]:
            yield from inner
        else:
            yield f"{where} is {_short(value)}: {error}"


def _is_meant(kind: Any, value: Any) -> bool:
    """Return whether an object says that it is of this kind of a union."""
    if not (isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, Mapping)):
        return False
    config = kind.__struct_config__
    return config.tag_field is not None and value.get(config.tag_field) == config.tag


def _short(value: Any) -> str:
    return repr(value)[:60]
