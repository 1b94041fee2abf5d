"""Every way of paying attention: each mechanism a value you pass, each claim tested.

`import regard` loads nothing else. The first use of one of its names (`regard.layer`, `from regard import Spec`) imports
`regard.api`, and torch with it; a submodule (`regard.patterns`) is imported when it is first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from regard._version import version as __version__  # noqa: F401

if TYPE_CHECKING:
    from regard.api import *  # noqa: F403
    from regard.api import __all__  # noqa: F401
else:

    def __getattr__(name: str) -> Any:
        """Find a submodule, or a public name in `regard.api`."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        if name != "__all__" and find_spec(f"regard.{name}"):
            return import_module(f"regard.{name}")
        api = import_module("regard.api")
        if name == "__all__" or name in api.__all__:
            return getattr(api, name)
        raise AttributeError(f"module 'regard' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
