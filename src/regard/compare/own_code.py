"""Mechanisms and tasks of your own: `mypkg.mod:MyCore` by its module, and a task by its file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from regard.arena.arena_catalogue import ARENA, arena_class
from regard.arena.arena_task import ArenaTask
from regard.catalogue import CATALOGUE
from regard.mixers.base import Core, Mixer
from regard.options import parse_options
from regard.spec import Spec, register

OWN = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?P<options>\(.*\))?", re.DOTALL)
OWN_FAMILY = "own"


def compared_spec(text: str) -> Spec:
    """Read a mechanism: a spec, a pattern, or `mypkg.mod:MyCore(size=3)`, which is imported and registered."""
    match = OWN.fullmatch(text.strip())
    if match is None:
        return Spec.parse(text)
    kind = _own_class(match["module"], match["name"])
    return Spec.parse(f"{_registered(kind)}{match['options'] or ''}")


def mechanism_family(text: str) -> str:
    spec = compared_spec(text)
    return spec.row.family


def own_source(text: str) -> str:
    """Return a hash of the file that defines a mechanism of your own; empty for those of the catalogue."""
    match = OWN.fullmatch(text.strip())
    if match is None:
        return ""
    return _digest(inspect.getsourcefile(_own_class(match["module"], match["name"])))


def _own_class(module: str, name: str) -> type:
    """Import a module, of the current folder too, and return a class of it."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise ValueError(f"{module} needs {error.name}, which is not installed") from None
        raise ValueError(f"there is no module {module}: write the one that Python imports, as in mypkg.mod:MyCore") from None
    kind = getattr(found, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Core | Mixer):
        raise ValueError(f"{module} has no {name} that is a regard.Core or a regard.Mixer")
    return kind


def _registered(kind: type) -> str:
    """Return the name of a class in the catalogue, where it is added once."""
    for row in CATALOGUE.values():
        if row.make is kind:
            return row.name
    name = kind.__name__.lower()
    if name in CATALOGUE:
        name = f"own_{name}"
    return register(name, kind, family=OWN_FAMILY, summary=inspect.getdoc(kind) or "").name


def read_task(text: str, files: tuple[str, ...] = ()) -> ArenaTask:
    """Read a task with its options: one of the arena, or one of your own files."""
    own = {kind.name: kind for path in files for kind in file_tasks(path)}
    known = {name: arena_class(name) for name in ARENA}
    if taken := sorted(own.keys() & known.keys()):
        raise ValueError(f"{', '.join(taken)} is a task of the arena already: set another name in your file")
    return parse_options(text, known | own)


def file_tasks(path: str) -> list[type[ArenaTask]]:
    """Return the tasks that a Python file defines."""
    module = _file_module(Path(path))
    kinds = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, ArenaTask)]
    found = [kind for kind in kinds if kind.__module__ == module.__name__ and kind.name]
    if not found:
        raise ValueError(f"{path} defines no task: subclass regard.arena.arena_task.ArenaTask and set its name")
    return found


def task_source(task: ArenaTask) -> str:
    """Return a hash of the file of a task of your own; empty for those of the arena."""
    if task.name in ARENA:
        return ""
    return _digest(inspect.getsourcefile(type(task)))


def _digest(path: str | None) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""


def _file_module(path: Path) -> ModuleType:
    """Import a file under a name of its own, once for each content."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} with a task")
    name = f"regard_own_task_{_digest(str(path))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{str(path)!r} is not a Python file: a task is a class in a file such as mytask.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
