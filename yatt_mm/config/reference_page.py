"""Makes the page that explains every key of the configuration: `python -m yatt_mm.config.reference_page >
docs/configuration.md`."""

from __future__ import annotations

import json

import yaml
from pydantic.fields import FieldInfo

from yatt_mm.config.run_config import Config
from yatt_mm.config.values import Section
from yatt_mm.config.yaml_file import section_inside


def reference(section: type[Section] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (key, default, meaning) of every value in the tree, in order."""
    rows: list[tuple[str, str, str]] = []
    for name, field in section.model_fields.items():
        inside = section_inside(field.annotation)
        if inside is None or inside[1] != ".":
            rows.append((f"{prefix}{name}", _default(field), " ".join(str(field.description).split())))
        if inside is not None:
            rows += reference(inside[0], f"{prefix}{name}{inside[1]}")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, width=1000).replace("\n...", "").strip()


def reference_page() -> str:
    """Return the text of docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "One YAML file is a whole run; `python -m yatt_mm.train FILE key=value ...` overrides single keys. Unknown",
        "keys are refused with the nearest known one. The resolved tree is written to `runs/<name>/config.yaml`.",
        "Sizes are written `512MiB`, `1.5GiB`; times are seconds. With `extends: other.yaml` (a path from the file's",
        "own folder) a file has the values of the other one wherever it has none itself; a list counts as one value.",
        "This page is made by `python -m yatt_mm.config.reference_page`.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{key}` | {f'`{default}`' if default else 'required'} | {meaning} |"
        for key, default, meaning in reference()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference_page(), end="")
