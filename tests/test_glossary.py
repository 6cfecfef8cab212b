"""Tests of the project's language: retired words are not used, and no docstring begins in the middle of a sentence."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.import_graph import ROOT

RETIRED = {
    r"somebody|someone|whoever|whomever|everybody|everyone|nobody": "name the role: the caller, every rank, no client",
    r"reckon\w*": "count, compute, expect",
    r"dear": "expensive",
    r"(be|to be|been) had": "available",
    r"called off|calls? off": "cancelled",
    r"as ever|at hand|lest|thereof|wherein|whereby": "the usual word",
    r"(fell|falls?) asleep over": "had not finished when it was put to sleep",
    r"come to rest|comes to rest": "is idle",
    r"strangers?": "clients without a token, clients without a key",
    r"patience": "the timeout, or how often something is tried again",
    r"colleagues?": "the actors that a controller calls",
    r"place ?(writer|stream)s?": "InplacePut, InplaceStream",
    r"reader ?sessions?|scope ?keepers?": "LeaseSession, ScopeHeartbeat",
    r"residents|desk": "ObjectTable, PhaseContext",
}
"""Words and names that the code no longer uses, and what it says instead (docs/architecture.md has the glossary)."""
NEWLINE = "\n"
SELF = Path(__file__).relative_to(ROOT)
HISTORY = Path("CHANGELOG.md")
"""Files that keep the retired words, because they describe the past."""


@functools.cache
def tracked_files() -> dict[Path, str]:
    """Return the project's texts by file: code, docs and configurations."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    kinds = {".py", ".md", ".yaml", ".yml", ".toml"}
    return {
        file: (ROOT / file).read_text()
        for file in files
        if file.suffix in kinds and file not in (SELF, HISTORY) and file.name != "LICENSE" and (ROOT / file).exists()
    }


def docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, text) of every string that stands alone: docstrings, and those under fields and constants."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


@functools.cache
def retired() -> list[tuple[str, str]]:
    """Return (place, word) of every retired word in the project's texts."""
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(RETIRED)})(?![A-Za-z])", re.IGNORECASE)
    return [
        (f"{file}:{text.count(NEWLINE, 0, match.start()) + 1}", match[0])
        for file, text in tracked_files().items()
        for match in pattern.finditer(text)
    ]


@pytest.mark.parametrize("words", RETIRED)
def test_a_retired_word_is_used_nowhere(words: str) -> None:
    same = re.compile(words, re.IGNORECASE)
    found = [f"{place}: {word!r}; say: {RETIRED[words]}" for place, word in retired() if same.fullmatch(word)]
    assert not found, "\n".join(found)


def test_no_docstring_begins_with_of_or_as() -> None:
    found = [
        f"{file}:{line}: {text[:60]!r}"
        for file, code in tracked_files().items()
        if file.suffix == ".py" and re.search(r"[\"'](\s|\\\n)*(Of|As)\b", code)  # to parse them all takes seconds
        for line, text in docstrings(ast.parse(code))
        if re.match(r"(Of|As)\b", text)
    ]
    assert not found, "\n".join(found)


def test_the_files_that_are_searched_are_those_of_the_project() -> None:
    files = tracked_files()
    assert len(files) > 400 and Path("dataplane/core/refs.py") in files and Path("docs/architecture.md") in files
