"""Defects for `mutants.py`: tasks of the arena and what compares mechanisms on them. Each names the tests that must notice it."""

from __future__ import annotations

R = "src/regard/"

ARENA: dict[str, tuple[str, str, str, str]] = {
    # recall and copying
    "an example may be in two drawn splits": (
        R + "arena/example_draws.py",
        "new = ~torch.isin(row_hashes(drawn.tokens), taken)",
        "new = torch.ones(len(drawn.tokens), dtype=torch.bool)",
        "arena_recall",
    ),
    "a key is told twice": (R + "arena/example_draws.py", "again = seen_before(part)", "again = part < 0", "arena_recall"),
    "hashes depend on padding": (
        R + "arena/example_draws.py",
        "weights = torch.full((flat.shape[1],), MULTIPLIER).cumprod(0)",
        "weights = torch.full((flat.shape[1],), MULTIPLIER).cumprod(0).flip(0)",
        "arena_recall",
    ),
    "recall is uniform over gaps": (
        R + "arena/recall.py",
        "weights = (self.power - 1) * torch.arange(1, space + 1).log()",
        "weights = torch.zeros(space)",
        "arena_recall",
    ),
    "the value of another key is scored": (
        R + "arena/recall.py",
        "IGNORED).scatter_(1, places, values)",
        "IGNORED).scatter_(1, places, values.flip(1))",
        "arena_recall",
    ),
    "a distance is that of the key": (
        R + "arena/recall.py",
        "places - torch.arange(1, begin, 2)",
        "places - torch.arange(0, begin, 2) + 2",
        "arena_recall",
    ),
    "copied tokens are in any order": (
        R + "arena/selective_copy.py",
        ".topk(self.copied, dim=1).indices.sort(1).values",
        ".topk(self.copied, dim=1).indices",
        "arena_recall",
    ),
    "a fresh batch is the old one": (
        R + "arena/selective_copy.py",
        "drawn, data, _ = self.drawn(len(tokens), generator, tokens.device)",
        "drawn, data, _ = self.drawn(len(tokens), torch.Generator().manual_seed(0), tokens.device)",
        "arena_recall",
    ),
    "the answer of induction is the token before the trigger": (
        R + "arena/induction.py",
        "tokens.gather(1, place + 1)",
        "tokens.gather(1, (place - 1).clamp(min=0))",
        "arena_recall",
    ),
    "floors take the rarest label": (
        R + "arena/token_floors.py",
        "counts.argsort(stable=True)",
        "counts.argsort(stable=True, descending=True)",
        "arena_recall",
    ),
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
    "reviews of test stay in train": (
        R + "arena/text_bytes.py",
        "[review for review in train if review[0] not in held_out]",
        "train",
        "arena_read",
    ),
    "a turned pair of papers is another pair": (
        R + "arena/retrieval.py",
        "        train = [pair for pair in train if frozenset(pair[1:]) not in held_out]\n",
        "        train = [pair for pair in train if pair not in test]\n",
        "arena_read",
    ),
    "a paper is in two splits": (R + "arena/retrieval.py", "        if first == second:\n", "        if True:\n", "arena_read"),
    "a pair of train tells its own label": (R + "arena/retrieval.py", "inside = pairs is train", "inside = False", "arena_read"),
    "an image of test stays in train": (
        R + "arena/image_pixels.py",
        "fresh = rows[new_rows(torch.from_numpy(train.images[rows]), taken)]",
        "fresh = rows",
        "arena_read",
    ),
    "some examples are the first ones": (
        R + "arena/read_task.py",
        "drawn = np.random.default_rng(SELECTION_SEED).permutation(there)",
        "drawn = np.arange(there) * 2 % there",
        "arena_read",
    ),
    "equal scores are parted by a threshold": (
        R + "arena/trivial_floors.py",
        "ordered[1:] > ordered[:-1]",
        "ordered[1:] >= ordered[:-1]",
        "arena_read",
    ),
    "an n-gram counts each time": (
        R + "arena/trivial_floors.py",
        "        yield cells[last[cells] == places]\n",
        "        yield cells\n",
        "arena_read",
    ),
}
