"""Code of your own in a comparison: a task by its file, and hashes of the files of tasks and mechanisms."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from regard.arena.arena_catalogue import ARENA, arena_class, source_digest
from regard.arena.arena_task import ArenaTask
from regard.options import parse_options
from regard.own_mechanism import named_class, split_own


def own_source(text: str) -> str:
    """Return a hash of the file that defines a mechanism of your own; empty for those of the catalogue."""
    own = split_own(text)
    return "" if own is None else source_digest(inspect.getsourcefile(named_class(own.name)))


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


def _file_module(path: Path) -> ModuleType:
    """Import a file under a name of its own, once for each content."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} with a task")
    name = f"regard_own_task_{source_digest(str(path))}"
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
