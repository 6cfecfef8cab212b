"""Tests which packages may import which, and that no file imports another in a circle. The imports are read from the
sources."""

import ast

import pytest

from tests.import_graph import (
    PAGE,
    PROJECT,
    ROOT,
    allowed_imports,
    circles,
    file_graph,
    light_tests,
    modules,
    package_graph,
    package_of,
    page_with_pictures,
    reachable,
)

MAX_MODULES = 25
PACKAGES = sorted({package_of(module) for module in modules(*PROJECT)})
TOPS = {"dataplane": (), "models": (), "yatt_mm": ("dataplane", "models")}
"""The other top-level packages that each top-level package may import."""


def test_no_files_import_each_other_in_a_circle_type_hints_included() -> None:
    assert circles(file_graph(*PROJECT)) == []


def test_no_packages_import_each_other_in_a_circle_type_hints_included() -> None:
    assert circles(package_graph()) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}) == [["a", "b"], ["c", "d"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_its_docstring_allows_and_no_more(package: str) -> None:
    assert package_graph()[package] == allowed_imports(package)


@pytest.mark.parametrize("top", PROJECT)
def test_top_level_packages_import_only_those_below(top: str) -> None:
    graph = package_graph()
    found = {other.split(".")[0] for package in graph if package.split(".")[0] == top for other in graph[package]}
    assert found - {top} <= set(TOPS[top])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_first_what_it_is(package: str) -> None:
    docstring = ast.get_docstring(ast.parse(modules(*PROJECT)[package].read_text())) or ""
    first = docstring.split("\n\n")[0]
    assert len(first) > 30 and not first.startswith("May import")


def test_no_folder_holds_more_modules_than_a_reader_can_take_in() -> None:
    folders = {path.parent for top in (*PROJECT, "benchmarks", "examples", "tests") for path in modules(top).values()}
    crowded = {
        str(folder.relative_to(ROOT)): num
        for folder in folders
        if (num := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MAX_MODULES
    }
    assert not crowded


def test_the_pictures_of_the_architecture_page_show_the_imports_as_they_are() -> None:
    page = PAGE.read_text()
    assert page == page_with_pictures(page), "run: python -m tests.import_graph --write"


def test_tests_without_torch_are_told_from_those_with_it() -> None:
    names = {path.name for path in light_tests()}
    assert {"test_store.py", "test_refs.py", "test_dynamic_sampling.py"} <= names
    assert not names & {"test_parity.py", "test_vllm_engine.py", "test_torch_view.py", "test_megatron_engine.py"}


def test_what_is_reachable_is_found_through_any_number_of_steps() -> None:
    assert reachable({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}, "a") == {"b", "c"}
