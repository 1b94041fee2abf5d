"""Defects for `mutants.py`: tasks of the arena and what compares mechanisms on them. Each names the tests that must notice it."""

from __future__ import annotations

R = "src/regard/"

ARENA: dict[str, tuple[str, str, str, str]] = {
    # the language model of papers
    "bytes between windows of papers are left out": (
        R + "arena/papers.py",
        "len(text) - 1), self.length)",
        "len(text) - 1), self.length + 1)",
        "arena_papers",
    ),
    "a paper counts twice": (R + "arena/papers.py", "texts = dict.fromkeys(", "texts = list(", "arena_papers"),
    "n-grams do not back off": (
        R + "arena/papers.py",
        "lower = np.where(seen, mixed, lower)",
        "lower = mixed + 1e-9",
        "arena_papers",
    ),
    "padding of papers is scored": (
        R + "arena/papers.py",
        "masked_fill_(places >= lengths[:, None], IGNORED)",
        "masked_fill_(places > lengths[:, None], IGNORED)",
        "arena_papers",
    ),
    # the tasks of MAD
    "labels behind a bottleneck are read from their own tokens": (
        R + "compare/bottleneck_head.py",
        "code = y[:, -1:]",
        "code = y",
        "arena_mad",
    ),
    "a bottleneck is padding": (
        R + "compare/bottleneck_head.py",
        "last = torch.where(valid, places, 0).amax(1)",
        "last = torch.where(valid, places, places).amax(1)",
        "arena_mad",
    ),
    "a first value is scored": (
        R + "arena/mad_recall.py",
        "torch.zeros_like(noise), before >= 0]",
        "torch.zeros_like(noise), before >= -1]",
        "arena_mad",
    ),
    "training of MAD scores answers alone": (
        R + "arena/mad_tasks.py",
        'None if part == "train" else scored',
        "scored",
        "arena_mad",
    ),
    "the last key was noise": (
        R + "arena/mad_recall.py",
        "(~noise[:, :-1]).float()",
        "torch.ones_like(noise[:, :-1]).float()",
        "arena_mad",
    ),
    "equal fuzzy keys have several values": (
        R + "arena/mad_recall.py",
        "first = first_places(numbers)",
        "first = torch.arange(pairs).expand(shape)",
        "arena_mad",
    ),
    "a fuzzy probe is never shown": (
        R + "arena/mad_recall.py",
        "torch.where(shown.any(1, keepdim=True), order.gather(1, place), 0)",
        "order.gather(1, place)",
        "arena_mad",
    ),
    "fuzzy test keys are short": (
        R + "arena/mad_recall.py",
        "least = self.key_size if full_keys else 1",
        "least = 1",
        "arena_mad",
    ),
    "no blank lies in front of the last token": (
        R + "arena/mad_memory.py",
        "slots = torch.randint(self.copied, (",
        "slots = torch.randint(self.copied - 1, (",
        "arena_mad",
    ),
    "splits have facts of their own": (
        R + "arena/mad_memory.py",
        "self.values()[keys]",
        "(1 + self.answers + torch.randperm(self.answers, generator=generator))[keys]",
        "arena_mad",
    ),
    "the commonest token is that of the future": (
        R + "arena/token_floors.py",
        "seen.cumsum(1, dtype=torch.int32).argmax(-1)",
        "seen.flip(1).cumsum(1, dtype=torch.int32).flip(1).argmax(-1)",
        "arena_mad",
    ),
    # recall and copying
    "an example may be in two drawn splits": (
        R + "arena/example_draws.py",
        "new = ~torch.isin(row_hashes(drawn.tokens), taken)",
        "new = torch.ones(len(drawn.tokens), dtype=torch.bool)",
        "arena_recall",
    ),
    "a key is told twice": (
        R + "arena/example_draws.py",
        "again = previous_places(part) >= 0",
        "again = part < 0",
        "arena_recall",
    ),
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
        "(lower + upper) // 2, counts @",
        "(upper + upper) // 2, counts @",
        "arena_lra",
    ),
    "the median of subtrees is the upper one": (
        R + "arena/listops.py",
        "(lower + upper) // 2, (counts",
        "(upper + upper) // 2, (counts",
        "arena_recipes",
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
        "if name == last else getattr(self, name), taken, str(self))",
        "if name == last else getattr(self, name), set(), str(self))",
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
    "a dash that is taken back leaves its marks": (
        R + "arena/dashed_paths.py",
        "self.canvas.occupy(rows, self._dash(rows, self.step[rows]), -1)",
        "pass",
        "pathfinder",
    ),
    "the newest dash of the other path is not seen": (
        R + "arena/dashed_paths.py",
        "        self.canvas.occupy(kept, found.some(fits))\n",
        "        self.canvas.occupy(kept, last.some(fits))\n",
        "pathfinder",
    ),
    "a distractor that ended early is drawn": (
        R + "arena/dashed_paths.py",
        "self.dashes += [dash._replace(alive=path[-1].alive) for dash in path]",
        "self.dashes += path",
        "pathfinder",
    ),
    "dots are at the ends of one path always": (
        R + "arena/pathfinder.py",
        "np.where(labels[:, None] == 1, ends[:, 0, 1], ends[:, 1, 1])",
        "ends[:, 0, 1]",
        "pathfinder",
    ),
    "a path turns by any angle": (
        R + "arena/dashed_paths.py",
        "np.arcsin(2 * self.random(len(rows), TURNS) - 1)",
        "np.pi * (2 * self.random(len(rows), TURNS) - 1)",
        "pathfinder",
    ),
    "splits of all seeds share a file": (
        R + "arena/split_cache.py",
        '{GENERATOR_VERSION} {key}".encode()',
        '{GENERATOR_VERSION}".encode()',
        "arena_lra",
    ),
    "a failed write leaves a part of a split": (
        R + "arena/split_cache.py",
        "        Path(name).unlink(missing_ok=True)\n",
        "",
        "arena_lra",
    ),
}
