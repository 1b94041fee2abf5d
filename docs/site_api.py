"""Pages of the site that come from the code: every public name with its signature and its docstring."""

from __future__ import annotations

import doctest
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import regard

PACKAGES = {
    "regard": "The names that most programs need: build a layer, describe a mechanism, attend with given queries and keys.",
    "regard.patterns": "Which query may see which key, as values.",
    "regard.positions": "Positions that are added to tokens, turn queries and keys, or are a bias of scores.",
    "regard.modules": "Modules of `torch.nn` with any mechanism inside.",
    "regard.blocks": "Residual blocks and stacks of them.",
    "regard.models": "Embeddings, encoders, decoders, heads, and the models made of them.",
    "regard.decoding": "Generating: greedy, sampled, by beams, and fast decoders.",
    "regard.tasks": "The table of tasks, and their configurations.",
    "regard.hf": "Mechanisms inside models of Hugging Face's transformers.",
    "regard.pretrained": "Checkpoints of Hugging Face, read and written.",
    "regard.laws": "The laws that every mechanism must keep, and how to check one.",
}


def public_names(package: str) -> dict[str, Any]:
    """Names of a package's `__all__`, sorted, with what they are."""
    module = import_module(package)
    return {name: getattr(module, name) for name in sorted(module.__all__, key=str.lower)}


def home(package: str, value: Any) -> str:
    """The package whose page describes a value: `regard`, if it has it too, else the first one of the list."""
    for other in PACKAGES:
        if any(value is found for found in public_names(other).values()):
            return other
    return package


class _Raw:
    """Print as a text without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(name: str, value: Any) -> str:
    """Write a call as its definition has it, or nothing for a value that cannot be called."""
    plain = inspect.isclass(value) and issubclass(value, Exception) and "__init__" not in vars(value)
    if plain or not (inspect.isroutine(value) or inspect.isclass(value)):
        return ""
    call = inspect.signature(value)
    parameters = [
        p.replace(annotation=_raw(p.annotation), default=p.default if p.default is p.empty else _Raw(_default(p.default)))
        for p in call.parameters.values()
    ]
    return name + str(call.replace(parameters=parameters, return_annotation=_raw(call.return_annotation)))


def _raw(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Raw(text) if isinstance(text, str) else annotation


def _default(value: Any) -> str:
    """Write a default as code would name it."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__ if value.__name__.isidentifier() else "..."
    return "..." if repr(value).startswith("<") else repr(value)


@cache
def comments() -> dict[str, str]:
    """Lines that begin with `#:` above a name, for what has no docstring of its own: tables and types."""
    found = {}
    for path in Path(regard.__file__).parent.rglob("*.py"):
        for block, name in re.findall(r"((?:^#:.*\n)+)^(\w+)\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = "\n".join(line.removeprefix("#:").removeprefix(" ") for line in block.splitlines())
    return found


def described(name: str, value: Any) -> str:
    """The text that stands beside a public name: its docstring, or its comment where a value has none."""
    own = inspect.isclass(value) or inspect.isroutine(value)
    return (inspect.getdoc(value) or "" if own else "") or comments().get(name, "")


def sections(text: str) -> str:
    """Turn a docstring into Markdown: examples become blocks of code, all else stays as it is laid out."""
    parts: list[str] = []
    for piece in doctest.DocTestParser().parse(text):
        if isinstance(piece, doctest.Example):
            shown = "\n".join(f"{'>>>' if i == 0 else '...'} {line}" for i, line in enumerate(piece.source.splitlines()))
            block = f"{shown}\n{piece.want}".rstrip()
            if parts and parts[-1].startswith("```pycon"):
                parts[-1] = parts[-1].removesuffix("\n```") + f"\n{block}\n```"
            else:
                parts.append(f"```pycon\n{block}\n```")
        elif piece.strip():
            parts += [_words(paragraph) for paragraph in re.split(r"\n\s*\n", piece.strip("\n"))]
    return "\n\n".join(parts)


def _words(paragraph: str) -> str:
    """Sentences flow; a list stays one, and lines that are indented are a block."""
    lines = [line.rstrip() for line in paragraph.splitlines()]
    if any(line.startswith("  ") for line in lines[1:]) and not lines[0].startswith("- "):
        return "```text\n" + "\n".join(lines) + "\n```"
    return "\n".join(_plain(line) for line in lines)


def _plain(line: str) -> str:
    """Escape what Markdown would read as its own, outside of code."""
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(piece if piece.startswith("`") else re.sub(r"([\\*_<>\[\]#|~$])", r"\\\1", piece) for piece in pieces)


def api_page(package: str) -> str:
    """Write the page of one package: a table of its names, then each name that is at home there."""
    names = public_names(package)
    own = {name: value for name, value in names.items() if home(package, value) == package}
    parts = [f"# {package}", PACKAGES[package], f"```python\nimport {package}\n```"]
    elsewhere = [f"[{name}]({page_name(home(package, value))}.md)" for name, value in names.items() if name not in own]
    if elsewhere:
        parts.append(f"Described elsewhere: {', '.join(elsewhere)}.")
    for name, value in own.items():
        shown = signature(name, value)
        call = f"```python\n{_folded(shown)}\n```" if shown else ""
        parts += [f"## {name}", call, sections(described(name, value)), _methods(value)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _folded(text: str, width: int = 100) -> str:
    """Write a long call with a parameter on every line."""
    if len(text) <= width:
        return text
    lines, depth = [""], 0
    for letter in text:
        depth -= letter in ")]}"
        if letter in ")" and depth == 0:
            lines += [letter]
        elif not (letter == " " and not lines[-1].strip()):
            lines[-1] += letter
        depth += letter in "([{"
        if depth == 1 and letter in "(,":
            lines += [""]
    return "\n".join(line if line[:1] == ")" or i == 0 else f"    {line}" for i, line in enumerate(lines) if line)


def _methods(value: Any) -> str:
    """List public methods and properties that a class of this package defines, with the first line of their docstrings."""
    if not inspect.isclass(value):
        return ""
    lines = []
    for name, found in vars(value).items():
        method = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        text = method.__doc__ if inspect.isfunction(method) or isinstance(method, property) else None
        if not name.startswith("_") and text:
            call = name if isinstance(method, property) else signature(name, method)
            lines.append(f"- `{call}`: {_plain(text.splitlines()[0])}")
    return "\n".join(lines)


def page_name(package: str) -> str:
    return package.replace(".", "_")


def write_api(folder: Path) -> list[str]:
    """Write a page for each public package, and return the names of the pages."""
    folder.mkdir(parents=True)
    for package in PACKAGES:
        (folder / f"{page_name(package)}.md").write_text(api_page(package), encoding="utf-8")
    return [page_name(package) for package in PACKAGES]
