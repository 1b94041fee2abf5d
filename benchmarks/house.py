"""Measure the code base: names, wording, density, import order, and the length of two forward passes.

python benchmarks/house.py                          print the table
python benchmarks/house.py --json                   the same, into results/house.json
python benchmarks/house.py --packages               rates of wording and density for every package
python benchmarks/house.py --list names             the names defined in two modules; also: words, lines, files
python benchmarks/house.py --anchors DIR ...        wording, names and density of other code bases, by the same definitions

Definitions
files           File basenames that occur twice in src/regard; those of REPEATABLE may.
homonyms        Top-level functions, classes and constants (dunder names excepted) defined in more than one module, as a share of
                all distinct top-level names. Public names are those without a leading underscore.
words           Words of WORDS (verbs and pronouns of persons) per 1,000 words of docstrings and comments. Text in backticks is
                code and does not count; a hyphenated compound (look-ahead) is one word. Not listed: "known", and "forget",
                a verb of the API.
density         Operations (BinOp, BoolOp, Compare, UnaryOp, IfExp, Call, comprehensions) per statement. Imports, definitions and
                docstrings are not statements here. Triton kernels are counted apart: their statements compute addresses.
line length     90th percentile over non-blank lines.
cycles          Pairs of packages (or top-level modules) of src/regard that import each other, directly or through others.
                Imports inside functions and under TYPE_CHECKING count.
calls           One forward of `layer("sparse(pattern=Local(64))", width=64, heads=4, causal=True)` on (2, 256, 64), after a
                warm-up: calls of named functions of regard (no lambdas, no comprehensions).
file switches   How often such a call is in another file than the call before it.
places          `Places` constructed by one forward of a translator with 6 + 6 layers and padded source and target.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "regard"
# A package (or top-level module) imports only what is in front of it here. `__init__` is that of regard itself.
ORDER = (
    *("_version", "checks", "synonyms", "text", "options", "transforms", "cache", "installed_mechanisms", "data", "arena"),
    *("patterns", "ops", "mixers", "positions", "catalogue_row", "catalogue", "own_mechanism", "spec"),
    *("blocks", "analysis", "laws", "modules", "config", "models", "runtime", "decoding"),
    *("scores", "training", "tasks", "pretrained", "hf", "bench", "plots", "compare", "api", "__init__", "cli", "__main__"),
)
REPEATABLE = {"__init__", "reference", "torch", "triton", "triton_kernels"}
_WORDS = """
ask asks asked asking hear hears heard hearing know knows knew knowing look looks looked looking mind minds
say says said saying speak speaks spoke spoken speaking stand stands stood standing talk talks talked talking
tell tells told telling want wants wanted wanting whisper whispers wish wishes wished hush hushed silent
anybody anyone everybody everyone nobody somebody someone who whoever whom
"""
WORDS = frozenset(_WORDS.split())
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
OPERATIONS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp, ast.Call, *COMPREHENSIONS)
DENSE = 5  # operations of a statement that `--list lines` shows
GOALS = {
    "files": "0",
    "homonyms, public": "0 %",
    "homonyms, all": "< 3 %",
    "words": "< 3",
    "density": "< 1.7",
    "cycles": "0",
    "calls": "< 70",
    "file switches": "< 25",
}


# Files and names


@cache
def parsed(path: Path) -> ast.Module:
    """Parse a file, once."""
    return ast.parse(path.read_text())


def modules(root: Path) -> list[Path]:
    """List the Python files below a folder."""
    return sorted(root.rglob("*.py"))


def repeated_files(root: Path = SOURCE) -> list[str]:
    """Return basenames of two or more files, the repeatable ones excepted."""
    counts = Counter(path.stem for path in modules(root))
    return sorted(name for name, count in counts.items() if count > 1 and name not in REPEATABLE)


def top_level_names(tree: ast.Module) -> set[str]:
    """Return names that a module defines: functions, classes, constants."""
    names: set[str] = set()
    for node in _module_level(tree.body):
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("__")}


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over the statements of a module, those inside `if`, `try` and `with` included."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _module_level([x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt)])
        else:
            yield node


@cache
def definitions(root: Path = SOURCE) -> dict[str, list[str]]:
    """Map each top-level name to the modules that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in modules(root):
        for name in top_level_names(parsed(path)):
            found[name].append(str(path.relative_to(root)))
    return dict(found)


def homonyms(root: Path = SOURCE, *, public: bool | None = None) -> dict[str, list[str]]:
    """Map each name that two modules define to those modules: public names, private ones, or both (None)."""
    found = definitions(root)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1 and _selected(name, public)}


def homonym_share(root: Path = SOURCE, *, public: bool | None = None) -> float:
    """Return the share of names that are homonyms, in percent."""
    names = [name for name in definitions(root) if _selected(name, public)]
    return 100 * len(homonyms(root, public=public)) / max(1, len(names))


def _selected(name: str, public: bool | None) -> bool:
    return public is None or public != name.startswith("_")


# Wording


class Text(NamedTuple):
    """One docstring or comment."""

    path: Path
    line: int
    text: str


def texts(path: Path) -> Iterator[Text]:
    """Iterate over the docstrings and comments of a file; comments for tools (noqa, type) are left out."""
    source = path.read_text()
    for node in ast.walk(parsed(path)):
        doc = _docstring(node)
        if doc is not None:
            yield Text(path, doc.lineno, doc.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|!)", token.string):
            yield Text(path, token.start[0], token.string)


def _docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, (ast.Module, *DEFINITIONS)) or not node.body:
        return None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def words(text: str) -> list[str]:
    """Split a text into lower-case words, without the code in backticks."""
    prose = re.sub(r"`[^`]*`", " ", text)
    return [word.lower() for word in re.findall(r"[A-Za-z]+(?:[-'][A-Za-z]+)*", prose)]


def personified(path: Path) -> list[tuple[int, str]]:
    """List (line, word) of the personified words of a file."""
    return [(found.line, word) for found in texts(path) for word in words(found.text) if word in WORDS]


def word_rate(root: Path = SOURCE) -> float:
    """Return personified words per 1,000 words of docstrings and comments."""
    paths = modules(root) if root.is_dir() else [root]
    every = [word for path in paths for found in texts(path) for word in words(found.text)]
    return 1000 * sum(word in WORDS for word in every) / max(1, len(every))


# Density


def statements(tree: ast.Module) -> list[ast.stmt]:
    """List the statements that are not imports, definitions or docstrings."""
    docs = {id(doc) for doc in map(_docstring, ast.walk(tree)) if doc is not None}
    skipped = (ast.Import, ast.ImportFrom, *DEFINITIONS)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not isinstance(node, skipped)]
    return [node for node in found if not (isinstance(node, ast.Expr) and id(node.value) in docs)]


def operations(node: ast.stmt) -> int:
    """Count the operations of one statement, without those of the statements inside it."""
    count = 0
    queue = [child for child in ast.iter_child_nodes(node) if not _nested(child)]
    while queue:
        found = queue.pop()
        count += isinstance(found, OPERATIONS)
        queue += [child for child in ast.iter_child_nodes(found) if not _nested(child)]
    return count


def _nested(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt)


def density(root: Path = SOURCE, kernels: bool = False) -> float:
    """Return operations per statement, outside of Triton kernels or inside of them alone."""
    paths = modules(root) if root.is_dir() else [root]
    count = lines = 0
    for path in paths:
        tree = parsed(path)
        inside = {id(node) for kernel in ast.walk(tree) if _is_kernel(kernel) for node in ast.walk(kernel)}
        count += sum(isinstance(node, OPERATIONS) and (id(node) in inside) == kernels for node in ast.walk(tree))
        lines += sum((id(node) in inside) == kernels for node in statements(tree))
    return count / max(1, lines)


def _is_kernel(node: ast.AST) -> bool:
    """Return whether a node is a function of Triton's language: its statements compute addresses."""
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


def line_length(root: Path = SOURCE, share: float = 0.9) -> int:
    """Return a percentile of the lengths of non-blank lines."""
    lengths = sorted(len(line) for path in modules(root) for line in path.read_text().splitlines() if line.strip())
    return lengths[int(share * (len(lengths) - 1))] if lengths else 0


# Imports


@cache
def imports(root: Path = SOURCE) -> dict[str, dict[str, set[str]]]:
    """Map each package to the packages it imports, and these to the files that do so."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in modules(root):
        inside = path.relative_to(root)
        package = inside.parts[0].removesuffix(".py")
        for name in _imported(parsed(path), root.name):
            if name != package and ((root / name).is_dir() or (root / f"{name}.py").exists()):
                found[package][name].add(str(inside))
    return {package: dict(names) for package, names in found.items()}


def _imported(tree: ast.Module, top: str) -> Iterator[str]:
    """Iterate over the second components of imported module names: `mixers` of `regard.mixers.base`."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts = [name.split(".") for name in names]
        yield from (part[1] for part in parts if part[0] == top and len(part) > 1)


def cycles(root: Path = SOURCE) -> list[tuple[str, str]]:
    """List pairs of packages that reach each other by imports."""
    graph = imports(root)
    reached = {package: _reachable(graph, package) for package in graph}
    return sorted((a, b) for a in graph for b in graph if a < b and b in reached[a] and a in reached[b])


def _reachable(graph: dict[str, dict[str, set[str]]], start: str) -> set[str]:
    seen: set[str] = set()
    queue = [start]
    while queue:
        new = set(graph.get(queue.pop(), {})) - seen
        seen |= new
        queue += new
    return seen


# Forward passes


def forward_calls() -> tuple[int, int]:
    """Count named calls of regard's functions and file switches in one forward of a sparse layer."""
    import torch

    import regard

    torch.manual_seed(0)
    layer = regard.layer("sparse(pattern=Local(64))", width=64, heads=4, causal=True)
    x = torch.randn(2, 256, 64)
    layer(x)
    files: list[str] = []
    package = str(Path(regard.__file__).parent)

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            files.append(code.co_filename)

    sys.setprofile(profile)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    switches = sum(a != b for a, b in pairwise(files))
    return len(files), switches


def places_built() -> int:
    """Count the `Places` constructed by one forward of a translator with 6 + 6 layers and padding on both sides."""
    import torch

    from regard.config import Config
    from regard.models import build

    torch.manual_seed(0)
    model = build.translator(Config(width=64, heads=4, depth=6, ffn=128, max_len=64), 100).eval()
    source = torch.randint(100, (2, 20))
    target = torch.randint(100, (2, 12))
    source_valid = torch.arange(20) < torch.tensor([[20], [13]])
    target_valid = torch.arange(12) < torch.tensor([[12], [7]])
    counter = _Constructions(_class_named("Places"))
    with torch.no_grad(), counter:
        model(source, source_valid, target, target_valid)
    return counter.count


def _class_named(name: str) -> type:
    """Find a class of a loaded regard module by name, wherever it is defined."""
    loaded = [module for key, module in sys.modules.items() if key.startswith("regard.")]
    return next(found for module in loaded if isinstance(found := vars(module).get(name), type))


class _Constructions:
    """Count the instances a class makes inside a `with` block, for named tuples and for ordinary classes."""

    def __init__(self, kind: type) -> None:
        self.kind, self.count = kind, 0
        names = ("__new__", "_make") if issubclass(kind, tuple) else ("__init__",)
        self.saved = {name: vars(kind)[name] for name in names}

    def __enter__(self) -> None:
        for name, method in self.saved.items():
            setattr(self.kind, name, self._counted(method))

    def __exit__(self, *_: object) -> None:
        for name, method in self.saved.items():
            setattr(self.kind, name, method)

    def _counted(self, method: Any) -> Any:
        plain = getattr(method, "__func__", method)

        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return plain(*args, **options)

        wrapper = type(method) if isinstance(method, staticmethod | classmethod) else None
        return counted if wrapper is None else wrapper(counted)


# The table


def static_rows(root: Path) -> dict[str, float]:
    """Measure what needs no import of the code: names, wording, density."""
    return {
        "homonyms, public": round(homonym_share(root, public=True), 1),
        "homonyms, private": round(homonym_share(root, public=False), 1),
        "homonyms, all": round(homonym_share(root), 1),
        "words": round(word_rate(root), 2),
        "density": round(density(root), 2),
        "density of kernels": round(density(root, kernels=True), 2),
        "line length": line_length(root),
    }


def house_rows() -> dict[str, float]:
    """Measure all points of src/regard."""
    calls, switches = forward_calls()
    rows: dict[str, float] = {"files": len(repeated_files())}
    rows |= static_rows(SOURCE)
    rows["cycles"] = len(cycles())
    return rows | {"calls": calls, "file switches": switches, "places": places_built()}


def show(rows: dict[str, float]) -> None:
    for name, value in rows.items():
        goal = GOALS.get(name)
        print(f"{name:20}{value:>8}   {'goal ' + goal if goal else ''}".rstrip())


def show_packages() -> None:
    parts = sorted({path.relative_to(SOURCE).parts[0] for path in modules(SOURCE)})
    for part in parts:
        print(f"{part:24}{word_rate(SOURCE / part):>8.2f} words{density(SOURCE / part):>8.2f} operations")


def show_list(kind: str) -> None:
    """Print the places behind a number."""
    if kind == "names":
        for name, files in homonyms().items():
            print(f"{name:24}{', '.join(files)}")
    elif kind == "words":
        for path in modules(SOURCE):
            for line, word in personified(path):
                print(f"{path.relative_to(ROOT)}:{line}: {word}")
    elif kind == "lines":
        for path in modules(SOURCE):
            for node in statements(parsed(path)):
                if operations(node) >= DENSE:
                    print(f"{path.relative_to(ROOT)}:{node.lineno}: {operations(node)}")
    else:
        print("\n".join(repeated_files()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write results/house.json")
    parser.add_argument("--packages", action="store_true", help="wording and density of every package")
    parser.add_argument("--list", choices=("names", "words", "lines", "files"), help="print the places behind a number")
    parser.add_argument("--anchors", nargs="+", type=Path, default=[], help="folders of other code bases")
    options = parser.parse_args()
    if options.list:
        return show_list(options.list)
    if options.packages:
        return show_packages()
    measured = [] if options.anchors and not options.json else [{"name": "regard", **house_rows()}]
    measured += [{"name": folder.name, **static_rows(folder)} for folder in options.anchors]
    for rows in measured:
        print(rows["name"])
        show({name: value for name, value in rows.items() if name != "name"})
    if options.json:
        from common import save

        print(save("house", {"goals": GOALS, "words": sorted(WORDS), "repeatable": sorted(REPEATABLE)}, measured))
    return None


if __name__ == "__main__":
    main()
