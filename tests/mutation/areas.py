"""The areas of the mutation pass: parts of the product, each with the tests that must notice a change of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Stages = tuple[tuple[str, ...], ...]
"""Test files and folders, the quickest first. The tests of a stage run if those of the stages before have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A part of the product."""

    sources: tuple[str, ...]
    """Folders and files, relative to the root."""
    tests: Mapping[str, Stages]
    """From the beginning of a source's path to its tests. The longest beginning counts."""
    share: float
    """The share of all mutants that are drawn from this area."""

    def stages(self, path: str) -> Stages:
        """Return the tests that must notice a change of this file."""
        return self.tests[max((start for start in self.tests if path.startswith(start)), key=len)]


_PARTS = (
    "tests/models/sequence",
    "tests/models/recipes",
    "tests/models/internvl",
    "tests/models/weights/test_checkpoint_files.py",
    "tests/models/test_parts.py",
)
_FOLDERS = (
    "tests/models/weights",
    *(f"tests/yatt_mm/preflight/test_{name}.py" for name in ("preflight", "first_prompts", "first_samples")),
)
_PARITY = ("tests/models/test_parity.py",)
_RANKS = tuple(
    f"tests/yatt_mm/training/test_{name}.py"
    for name in ("megatron_engine", "plans", "weight_source", "offload", "rank_checkpoint", "curves")
)
_STORE = tuple(
    f"tests/dataplane/storage/test_{name}.py"
    for name in (
        "allocator",
        "bookkeeping",
        "disk_tier",
        "ipc_file",
        "object_versions",
        "store",
        "store_machine",
        "turns",
    )
)
_PLAN = ("balance", "largest_differencing", "microbatches", "step_plan")

AREAS = {
    "models": Area(
        sources=("models",),
        tests={
            "models": (_PARTS, _FOLDERS, _PARITY, (*_RANKS, "tests/yatt_mm/weights", "tests/yatt_mm/training/lora")),
            "models/compat": (("tests/models/compat", "tests/models/test_parts.py"), _PARITY, _RANKS),
            "models/flops.py": (("tests/yatt_mm/training/test_flops.py", "tests/yatt_mm/control"),),
            "models/lora": (("tests/yatt_mm/training/lora", "tests/yatt_mm/config/test_lora_section.py"), _RANKS),
            "models/recipes": (("tests/models/recipes",), _FOLDERS, ("tests/examples",)),
        },
        share=0.4,
    ),
    "algorithms": Area(
        sources=("yatt_mm/algorithms",),
        tests={"": (("tests/yatt_mm/algorithms",), ("tests/yatt_mm/training/test_stale_tokens.py",))},
        share=0.1,
    ),
    "plan": Area(
        sources=tuple(f"yatt_mm/training/{name}.py" for name in _PLAN),
        tests={
            "": (
                ("tests/yatt_mm/control", "tests/yatt_mm/batching"),
                ("tests/yatt_mm/training/test_plans.py", "tests/yatt_mm/simulator"),
            )
        },
        share=0.2,
    ),
    "storage": Area(
        sources=("dataplane/storage",),
        tests={
            "": (
                _STORE,
                ("tests/dataplane/storage",),
                ("tests/dataplane/client", "tests/dataplane/derive/test_deriver.py", "tests/dataplane/test_soak.py"),
                ("tests/dataplane/server/test_put_and_get.py", "tests/dataplane/server/test_restart.py"),
            )
        },
        share=0.3,
    ),
}
