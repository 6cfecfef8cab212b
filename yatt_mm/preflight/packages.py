"""Checks that the imported packages `models` and `dataplane` are this project's, because other projects use these names
too. No torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("models", "dataplane")


def check_packages_are_ours(names: tuple[str, ...] = PACKAGES) -> None:
    """Raise ImportError if Python finds one of these packages elsewhere than next to yatt_mm. The error names the file
    that Python finds."""
    ours = Path(__file__).resolve().parents[2]
    for name in names:
        spec = importlib.util.find_spec(name)
        found = spec.origin if spec is not None else None
        wanted = ours / name / "__init__.py"
        if found is None or Path(found).resolve() != wanted:
            raise ImportError(
                f"the package {name!r} that Python finds is {found}, not this project's {wanted}; "
                "start from another folder, or take the other one out of PYTHONPATH or the environment",
                name=name,
            )
