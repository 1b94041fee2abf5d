"""Which backends computed a call: what REGARD_LOG=kernels would print, as a list."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from regard.cache import forget_signatures
from regard.ops import backend

LOG = "REGARD_LOG"


def backends_of(call: Callable[[], Any]) -> list[str]:
    """Run a call and list the backends that `auto` chose in it: "tile: triton"."""
    with _own_log():
        call()
        return sorted(f"{operation}: {name}" for operation, name in backend._logged)


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """Log backends into nothing, from an empty list on; afterwards everything is as before."""
    setting, logged = os.environ.get(LOG), set(backend._logged)
    backend._logged.clear()
    forget_signatures()  # of prepared calls, which choose no backend any more
    os.environ[LOG] = "kernels"
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        backend._logged.clear()
        backend._logged.update(logged)
        if setting is None:
            del os.environ[LOG]
        else:
            os.environ[LOG] = setting
