"""The import graph of the project, read from the sources: who imports whom, type hints and late imports included.

    python -m tests.import_graph             # print the packages, what each imports, and any circle
    python -m tests.import_graph --write     # draw the graphs into docs/architecture.md
    python -m tests.import_graph --light     # list the test files that need none of torch, vllm, ray and the like

A package is a folder with Python files. The line `May import:` in the docstring of its `__init__.py` is the rule.
`tests/test_import_graph.py` compares the rule with the imports.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = ("dataplane", "models", "yatt_mm")
PAGE = ROOT / "docs" / "architecture.md"
HEAVY = ("av", "decord", "megatron", "ray", "torch", "torchvision", "transformers", "vllm")
"""The packages that a test must not need if it is to run on a Python version for which they are not installed."""

Graph = dict[str, set[str]]


@cache
def modules(*tops: str) -> dict[str, Path]:
    """Return the files of these top-level folders by dotted name; a package has the name of its folder."""
    found = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported_names(path: Path, *, at_import: bool = False) -> frozenset[str]:
    """Return the dotted names that a file imports: `from a import b` gives `a` and `a.b`.

    They are those of all import statements, or with `at_import` of those that run when the file is imported;
    `pytest.importorskip` is one of them.
    """
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in _statements_at_import(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif at_import and isinstance(node, ast.Expr) and "importorskip(" in ast.unparse(node):
            names.update(part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return frozenset(names)


def _statements_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run at import: none in functions, and none for type checkers only."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _statements_at_import(child)


def file_graph(*tops: str, at_import: bool = False) -> Graph:
    """Return, for each module of these folders, the modules of the same folders that it imports."""
    known = modules(*tops)
    graph: Graph = {}
    for name, path in known.items():
        found = {
            imported for imported in imported_names(path, at_import=at_import) if imported in known and imported != name
        }
        # `from package import module` names the module; the package's own file is then no dependency
        graph[name] = {one for one in found if not any(other.startswith(f"{one}.") for other in found)}
    return graph


def package_of(module: str) -> str:
    """Return the package, which is the folder, of a module."""
    is_package = modules(*PROJECT)[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def package_graph() -> Graph:
    """Return, for each package of the project, the packages that its files import."""
    graph: Graph = {package_of(name): set() for name in modules(*PROJECT)}
    for name, imported in file_graph(*PROJECT).items():
        graph[package_of(name)] |= {package_of(other) for other in imported} - {package_of(name)}
    return graph


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm), each in sorted order."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    for node in sorted(graph):
        if node not in index:
            visit(node)
    sys.setrecursionlimit(limit)
    return found


def allowed_imports(package: str) -> set[str]:
    """Return the packages named after `May import:` in a package's docstring; `nothing` means none.

    A name that does not begin with a top-level package is a package inside the same top-level package.
    """
    docstring = ast.get_docstring(ast.parse(modules(*PROJECT)[package].read_text())) or ""
    match = re.search(r"^May import: (.*?)\.$", docstring, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"the docstring of {package}/__init__.py has no line `May import: a, b, c.`")
    names = {name.strip() for name in match[1].replace("\n", " ").split(",")} - {"nothing"}
    top = package.partition(".")[0]
    return {name if name.partition(".")[0] in PROJECT else f"{top}.{name}" for name in names}


def reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Return everything in the graph that can be reached from `start`."""
    found: set[str] = set()
    left = [start]
    while left:
        for other in graph.get(left.pop(), ()):
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def without_detours(graph: Graph) -> Graph:
    """Return the transitive reduction: an edge is left out if a longer path leads to the same package. The graph must
    have no circle."""
    return {
        node: {one for one in others if not any(one in reachable(graph, other) for other in others - {one})}
        for node, others in graph.items()
    }


def picture(top: str) -> str:
    """Return the packages of a top-level package as a mermaid graph; an arrow means `imports`."""
    inner = {name: {one for one in others if one.split(".")[0] == top} for name, others in package_graph().items()}
    reduced = without_detours({name: others for name, others in inner.items() if name.split(".")[0] == top})
    label = {name: name.removeprefix(f"{top}.").replace(".", "/") for name in reduced}
    lines = ["```mermaid", "graph TD"]
    lines += [f"    {label[a]} --> {label[b]}" for a in sorted(reduced) for b in sorted(reduced[a])]
    return "\n".join([*lines, "```"])


def page_with_pictures(text: str) -> str:
    """Return the text of a page with the graphs between its markers drawn anew."""
    for top in PROJECT:
        begin, end = f"<!-- imports of {top} -->", f"<!-- end of imports of {top} -->"
        before, _, rest = text.partition(begin)
        _, marker, after = rest.partition(end)
        if not marker:
            raise ValueError(f"{PAGE.name} has no markers {begin} and {end}")
        text = f"{before}{begin}\n\n{picture(top)}\n\n{end}{after}"
    return text


def light_tests() -> list[Path]:
    """Return the test files whose imports, and those of their conftests, lead to none of the heavy packages."""
    tops = (*PROJECT, "tests", "benchmarks", "examples")
    graph, known = file_graph(*tops, at_import=True), modules(*tops)

    def is_light(name: str) -> bool:
        parts = name.split(".")
        roots = {name} | {".".join([*parts[:end], "conftest"]) for end in range(1, len(parts))} & graph.keys()
        loaded = roots.union(*(reachable(graph, root) for root in roots))
        loaded |= {
            ".".join(one.split(".")[:end]) for one in loaded for end in range(1, one.count(".") + 1)
        } & known.keys()
        needed = {other.split(".")[0] for one in loaded for other in imported_names(known[one], at_import=True)}
        return not needed & set(HEAVY)

    return [known[name] for name in sorted(graph) if known[name].name.startswith("test_") and is_light(name)]


def main() -> int:
    """Run the command line. The exit status is 1 if there is a circle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"draw the graphs into docs/{PAGE.name}")
    parser.add_argument("--light", action="store_true", help="list the test files that need no heavy package")
    options = parser.parse_args()
    if options.light:
        print("\n".join(str(path.relative_to(ROOT)) for path in light_tests()))
        return 0
    if options.write:
        PAGE.write_text(page_with_pictures(PAGE.read_text()))
    graph = package_graph()
    for package in sorted(graph):
        print(f"{package}: {', '.join(sorted(graph[package])) or 'nothing'}")
    found = [*circles(graph), *circles(file_graph(*PROJECT))]
    for circle in found:
        print(f"circle: {' <-> '.join(circle)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
