"""Defects for `mutants.py`: the check of laws, and rows of other packages. Each names the tests that must notice it."""

from __future__ import annotations

L = "src/regard/laws/"

CHECKED: dict[str, tuple[str, str, str, str]] = {
    "a check of laws ends well whatever is broken": (
        "src/regard/cli/check_command.py",
        "        raise typer.Exit(1)\n",
        "        raise typer.Exit(0)\n",
        "check",
    ),
    "a check of laws forgives errors": (
        L + "mechanism_check.py",
        "        return LawBroken(kind, ",
        "        return None and LawBroken(kind, ",
        "check",
    ),
    "a check of laws keeps its cases large": (L + "mechanism_check.py", "found.what == broken.what", "False", "check"),
    "a check of laws takes a smaller case of something else": (
        L + "mechanism_check.py",
        "if found is not None and found.what == broken.what",
        "if True or found is not None and found.what == broken.what",
        "check",
    ),
    "a check of laws looks at short sequences alone": (L + "law_case.py", "LONG = 150 ", "LONG = 60 ", "check"),
    "a check of laws judges growth that was not claimed": (L + "law_case.py", "example is not UNMEASURED and ", "", "check"),
    "a check of laws leaves other random numbers behind": (
        L + "mechanism_check.py",
        "with torch.random.fork_rng(devices), warnings",
        "with warnings",
        "check",
    ),
    "a check of laws is content with one equal number": (
        L + "verdicts.py",
        "torch.isclose(found, wanted, rtol=tol, atol=tol).all()",
        "torch.isclose(found, wanted, rtol=tol, atol=tol).any()",
        "check",
    ),
    "a check of laws is content with another type": (L + "verdicts.py", " or found.dtype != wanted.dtype", "", "check"),
    "a check of laws passes claims that cannot be built": (
        L + "token_laws.py",
        "demand(case.can(claim, **wanted), ",
        "demand(True, ",
        "check",
    ),
    "a row without an example is registered": ("src/regard/spec.py", "    if not row.examples:\n", "    if False:\n", "check"),
}
