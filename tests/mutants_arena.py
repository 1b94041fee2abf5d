"""Defects for `mutants.py`: tasks of the arena and what compares mechanisms on them. Each names the tests that must notice it."""

from __future__ import annotations

R = "src/regard/"

ARENA: dict[str, tuple[str, str, str, str]] = {
    "the median of listops is the upper one": (
        R + "arena/listops.py",
        "(lower + upper) // 2",
        "(upper + upper) // 2",
        "arena_lra",
    ),
    "listops nests one level too deep": (R + "arena/listops.py", "level == depth - 1", "level == depth", "arena_lra"),
    "listops keeps trees of any length": (
        R + "arena/listops.py",
        "kept = (forest.sizes > least) & (forest.sizes < self.length)",
        "kept = forest.sizes < self.length",
        "arena_lra",
    ),
    "a shallow reader of listops sees one level more": (
        R + "arena/listops.py",
        "len(stack) < levels",
        "len(stack) <= levels",
        "arena_lra",
    ),
    "validation may hold examples of test": (
        R + "arena/generated_task.py",
        "            distinct_examples(stream, getattr(self, name), taken, str(self))\n",
        "            pass\n",
        "arena_lra",
    ),
    "an example is drawn twice": (R + "arena/generated_task.py", "            taken.add(key)\n", "", "arena_lra"),
    "a generator without new examples goes on": (
        R + "arena/generated_task.py",
        "        if without == PATIENCE:\n            break\n",
        "        if without == PATIENCE:\n            return join_examples(found)\n",
        "arena_lra",
    ),
}
