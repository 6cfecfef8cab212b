"""Finds the files of a registered root (`NAME=PATTERN`), and the format of each.

A pattern is a path, a glob or any fsspec URL, of files or of one folder. It may end in `#media=a,b&drop=c&optional=d`,
which tells what the types of the columns do not show. The format follows from the file's name, or else from its first
bytes.
"""

import glob
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from dataplane.core.errors import DatasetError
from dataplane.core.units import format_bytes
from dataplane.datasets.formats.columns import ColumnOptions
from dataplane.datasets.formats.file_search import filesystem_of, find_files
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import extension_of

Format = Literal["tar", "parquet", "jsonl", "arrow"]
FORMATS: dict[str, Format] = {
    "tar": "tar",
    "parquet": "parquet",
    "pq": "parquet",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "arrow": "arrow",
}
WANTED = "WebDataset tars (.tar), Parquet (.parquet), JSON lines (.jsonl) or a Hugging Face datasets folder"
GZIP = b"\x1f\x8b"
MAX_STATE_BYTES = 16 << 20
"""The largest `state.json` that is read: a set of 100,000 files has one of half this size."""
_OPTIONS = ("media", "drop", "optional")


@dataclass(frozen=True, slots=True)
class Root:
    """One registered pattern, split into its parts."""

    pattern: str
    options: ColumnOptions

    @property
    def folder(self) -> str:
        """The deepest folder that holds all files that the pattern can match."""
        path = _without_protocol(self.pattern)
        fixed = PurePosixPath(path)
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        is_folder = str(fixed) != path or Path(path).is_dir()
        return str(fixed if is_folder else fixed.parent)


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """A file, or a pattern that names many files, of a dataset, with its format."""

    file: RangeFile
    format: Format
    root: Root


def parse_root(text: str) -> Root:
    """Return a pattern and its options. Raises DatasetError for an unknown option."""
    pattern, hash_sign, options = text.rpartition("#")
    if not hash_sign or "=" not in options:
        return Root(text, ColumnOptions())
    values: dict[str, frozenset[str]] = {}
    for item in options.split("&"):
        key, _, names = item.partition("=")
        if key not in _OPTIONS:
            raise DatasetError(
                f"{text!r}: unknown option {key!r}; wanted {', '.join(f'#{name}=COLUMN' for name in _OPTIONS)}"
            )
        values[key] = values.get(key, frozenset()) | {name for name in names.split(",") if name}
    empty: frozenset[str] = frozenset()
    parsed = (values.get(name, empty) for name in _OPTIONS)
    media, drop, optional = parsed
    return Root(pattern, ColumnOptions(media=media, drop=drop, optional=optional))


def find_dataset_files(name: str, patterns: Sequence[str]) -> list[DatasetFiles]:
    """Return the files of every pattern, each once, in name order. Raises DatasetError if a pattern matches nothing."""
    found: dict[str, DatasetFiles] = {}
    for text in patterns:
        root = parse_root(text)
        files = find_files(root.pattern) or _files_of_folders(root.pattern)
        if not files:
            raise DatasetError(
                f"dataset {name!r}: no file matches {root.pattern!r} (from {Path.cwd()}); check the --root of the node"
            )
        found |= {file.path: DatasetFiles(file, format_of(file), root) for file in files}
    formats = {item.format: item.file.path for item in found.values()}
    if len(formats) > 1:
        examples = ", ".join(f"{kind} ({path})" for kind, path in sorted(formats.items()))
        raise DatasetError(f"dataset {name!r} mixes formats: {examples}; give each a --root name of its own")
    return list(found.values())


def format_of(file: RangeFile) -> Format:
    """Return the format of a file, by its name or else by its content. Raises DatasetError, which says what was found,
    if it is none of the known ones."""
    extension = extension_of(file.path)
    if extension in FORMATS:
        return FORMATS[extension]
    head = file.read(0, 512)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if head.lstrip().startswith(b"{"):
        return "jsonl"
    if head[257:262] == b"ustar":
        return "tar"
    remedy = "; unpack it with gunzip" if head.startswith(GZIP) else ""
    raise DatasetError(
        f"{file.path} is of no known format (extension {extension or 'none'!r}, first bytes {head[:8]!r}); "
        f"wanted {WANTED}{remedy}"
    )


def _files_of_folders(pattern: str) -> list[RangeFile]:
    """Return the files of the one folder that the pattern names. Which files these are depends on who wrote the folder:
    `save_to_disk` of `datasets`, or a repository of the Hugging Face hub."""
    folders = _folders(pattern)
    if not folders:
        return []
    if len(folders) > 1:
        raise DatasetError(f"{pattern!r} matches {len(folders)} folders and no file; name one, such as {folders[0]}")
    folder = folders[0]
    if find_files(f"{glob.escape(folder)}/dataset_dict.json"):
        splits = sorted(
            PurePosixPath(file.path).parent.name for file in find_files(f"{glob.escape(folder)}/*/state.json")
        )
        if len(splits) != 1:
            raise DatasetError(f"{folder} has the splits {', '.join(splits) or '(none)'}; name one: {folder}/SPLIT")
        folder = f"{folder}/{splits[0]}"
    state = find_files(f"{glob.escape(folder)}/state.json")
    return _saved_files(folder, state[0]) if state else _hub_files(folder)


def _saved_files(folder: str, state: RangeFile) -> list[RangeFile]:
    """Return the Arrow files of a dataset that `save_to_disk` wrote, in its order."""
    if state.nbytes > MAX_STATE_BYTES:
        raise DatasetError(
            f"{state.path} has {format_bytes(state.nbytes)}, and at most {format_bytes(MAX_STATE_BYTES)} are read: it "
            "is not what datasets' save_to_disk writes"
        )
    try:
        names = [item["filename"] for item in json.loads(state.read(0, state.nbytes))["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{state.path} is not what datasets' save_to_disk writes: {error!r}") from error
    if not all(isinstance(name, str) and PurePosixPath(name).name == name for name in names):
        raise DatasetError(f"{state.path} names files outside of its folder; copy the folder as a whole")
    files = [(name, find_files(f"{glob.escape(folder)}/{glob.escape(name)}")) for name in names]
    missing = [name for name, matches in files if not matches]
    if missing:
        raise DatasetError(f"{folder} lacks {missing[0]}, which its state.json names; copy the folder as a whole")
    return [matches[0] for _, matches in files]


def _hub_files(folder: str) -> list[RangeFile]:
    """Return the files of a folder in the layout of the Hugging Face hub. All are of one format and one split."""
    by_format: dict[Format, list[RangeFile]] = defaultdict(list)
    for extension in ("tar", "parquet", "jsonl", "arrow"):
        by_format[FORMATS[extension]] += find_files(f"{glob.escape(folder)}/**/*.{extension}")
    present = {kind: files for kind, files in by_format.items() if files}
    if len(present) != 1:
        counts = ", ".join(f"{len(files)} {kind}" for kind, files in present.items()) or "no file of a known format"
        raise DatasetError(f"{folder} holds {counts}; wanted {WANTED}: name the files with a glob")
    files = next(iter(present.values()))
    splits = sorted({_split_of(file) for file in files})
    if len(splits) > 1:
        raise DatasetError(
            f"{folder} has the splits {', '.join(splits)}; name one with a glob: {folder}/**/{splits[0]}*"
        )
    return files


def _split_of(file: RangeFile) -> str:
    """Return the split, such as `train` of `train-00000-of-00002.parquet`. Files without such numbers count as one
    split."""
    stem = PurePosixPath(file.path).stem
    split, dash, rest = stem.partition("-0")
    return split if dash and "-of-" in rest else ""


def _folders(pattern: str) -> list[str]:
    """Return the folders that a pattern matches. URLs keep their protocol."""
    protocol, separator, _ = pattern.partition("://")
    if not separator:
        matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
        return sorted(str(Path(path).absolute()) for path in matches if Path(path).is_dir())
    filesystem, path = filesystem_of(pattern)
    matches = filesystem.glob(path) if glob.has_magic(path) else [path]
    return [f"{protocol}://{match.lstrip('/')}" for match in sorted(matches) if filesystem.isdir(match)]


def _without_protocol(pattern: str) -> str:
    if "://" in pattern:
        return filesystem_of(pattern)[1]
    return str(Path(pattern).expanduser().absolute())
