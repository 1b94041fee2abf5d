"""Tables of kernel configurations as JSON, {card: {kernel: {key: configuration}}}: read, checked, merged. Imports no torch.

`tuned.json` beside this file is the shipped table: its card "default" serves every card that it does not list. The environment
variable REGARD_TUNED names a file whose entries replace those of the shipped table; `regard tune` writes such files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from regard.data.strict_json import JsonError, read_value

KernelConfig = dict[str, int]
TunedTable = dict[str, dict[str, dict[str, KernelConfig]]]
TUNED = Path(__file__).with_name("tuned.json")
OWN_TABLE = "REGARD_TUNED"
DEFAULT_CARD = "default"
ANY_KEY = "any"
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")  # warps, stages of a pipeline, most registers: Triton has defaults
FIELDS_OF_LEVELS = ("a card", "a kernel", "a key", "a configuration")


class TableError(ValueError):
    """Report a table of configurations that cannot be used: the file, the entry, and what is allowed."""


def shipped_table() -> TunedTable:
    """Read the table that is part of the package."""
    return _read(TUNED)


def current_table() -> TunedTable:
    """Read the shipped table, with the entries of the file that REGARD_TUNED names in place of its own."""
    shipped = shipped_table()
    own = os.environ.get(OWN_TABLE)
    if own and not Path(own).exists():
        raise TableError(f"{OWN_TABLE} names {own}, which does not exist: unset it, and `regard tune --out {own}` writes it")
    return merge_tables(shipped, read_table(Path(own), shipped)) if own else shipped


def read_table(path: Path, shipped: TunedTable) -> TunedTable:
    """Read a table and check every entry against the kernels of the shipped one."""
    table = _read(path)
    check_table(table, shipped, str(path))
    return table


def merge_tables(table: TunedTable, changes: TunedTable) -> TunedTable:
    """Return a table with the configurations of another one in place of its own. Both stay as they are."""
    merged = {card: {kernel: dict(keys) for kernel, keys in kernels.items()} for card, kernels in table.items()}
    for card, kernels in changes.items():
        for kernel, keys in kernels.items():
            merged.setdefault(card, {}).setdefault(kernel, {}).update(keys)
    return merged


def find_config(table: TunedTable, card: str, kernel: str, key: str) -> KernelConfig:
    """Return the configuration of a kernel: that of the card or else the default, for this key or else for any."""
    for configs in (table.get(card, {}).get(kernel, {}), table[DEFAULT_CARD].get(kernel, {})):
        for name in (key, ANY_KEY):
            if name in configs:
                return configs[name]
    raise KeyError(f"{TUNED.name} has no configuration of {kernel} for {key}, and none for {ANY_KEY}")


def kernel_fields(shipped: TunedTable, kernel: str) -> tuple[str, ...]:
    """Return the fields that every configuration of a kernel has: those of its default."""
    return tuple(shipped[DEFAULT_CARD][kernel][ANY_KEY])


def check_table(table: Any, shipped: TunedTable, name: str) -> None:
    """Raise a TableError with the name of the file and the entry, unless all kernels and fields exist and are positive."""
    _check_level(table, name, ())
    for card, kernels in table.items():
        _check_level(kernels, name, (card,))
        for kernel, keys in kernels.items():
            if kernel not in shipped[DEFAULT_CARD]:
                known = ", ".join(shipped[DEFAULT_CARD])
                raise TableError(f"{name}: {_place(card, kernel)} is no kernel of this version; kernels are {known}")
            _check_level(keys, name, (card, kernel))
            for key, config in keys.items():
                _check_level(config, name, (card, kernel, key))
                _check_config(config, kernel_fields(shipped, kernel), f"{name}: {_place(card, kernel, key)}")


def _check_config(config: dict[str, Any], fields: tuple[str, ...], where: str) -> None:
    needed = [field for field in fields if field not in LAUNCH_OPTIONS]
    missing = [field for field in needed if field not in config]
    unused = [field for field in config if field not in (*fields, *LAUNCH_OPTIONS)]
    if missing or unused:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unused)}, which its kernel does not take"
        raise TableError(f"{where} {wrong}; its fields are {', '.join(fields)}")
    for field, value in config.items():
        if type(value) is not int or value < 1:
            raise TableError(f"{where} has {field} = {value!r}; fields are integers of at least 1")


def _check_level(found: Any, name: str, path: tuple[str, ...]) -> None:
    if isinstance(found, dict):
        return
    where = f" at {_place(*path)}" if path else ""
    expected = FIELDS_OF_LEVELS[len(path)]
    raise TableError(f"{name}{where} has {type(found).__name__} where an object should be, with {expected} for every name")


def _place(*path: str) -> str:
    return " / ".join(repr(part) for part in path)


def _read(path: Path) -> Any:
    try:
        return read_value(path.read_bytes())
    except OSError as error:
        raise TableError(f"the table of kernel configurations {path} cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise TableError(f"the table of kernel configurations {path} is not JSON: {error}") from None


def table_text(table: TunedTable) -> str:
    """Write a table as JSON, one configuration a line."""
    cards = (_indented(card, [_kernel_text(*item) for item in kernels.items()], 1) for card, kernels in table.items())
    return "{\n" + ",\n".join(cards) + "\n}\n"


def _kernel_text(kernel: str, keys: dict[str, KernelConfig]) -> str:
    rows = [f"   {json.dumps(key)}: {json.dumps(config)}" for key, config in keys.items()]
    return _indented(kernel, rows, 2)


def _indented(name: str, rows: list[str], depth: int) -> str:
    indent = " " * depth
    body = ",\n".join(rows)
    return f"{indent}{json.dumps(name)}: {{\n{body}\n{indent}}}"
