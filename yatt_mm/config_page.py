"""The page that explains every key of the configuration: `python -m yatt_mm.config_page > docs/configuration.md`."""

from __future__ import annotations

import yaml

from yatt_mm.config import Config, Section


def reference(section: type[Section] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every value in the tree, in order."""
    rows: list[tuple[str, str, str]] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += reference(kind, f"{prefix}{name}.")
        else:
            default = "" if field.is_required() else yaml.safe_dump(field.default, default_flow_style=True)
            rows.append(
                (f"{prefix}{name}", default.replace("\n...", "").strip(), " ".join(str(field.description).split()))
            )
    return rows


def reference_page() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "One YAML file is a whole run; `python -m yatt_mm.train FILE key=value ...` overrides single keys. Unknown",
        "keys are refused with the nearest known one. The resolved tree is written to `runs/<name>/config.yaml`.",
        "Sizes are written `512MiB`, `1.5GiB`; times are seconds. `python -m yatt_mm.config_page` makes this page.",
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
