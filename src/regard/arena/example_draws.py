"""Draw the splits of generated tasks: a seed for each split, no example in two of them, integers as small as they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, ArenaTask, Examples, ExamplesPart
from regard.arena.generated_task import DRAW_ORDER, select_examples
from regard.arena.read_task import power_of_two
from regard.options import check_positive

REDRAWS = 50  # of drawing what is missing, before the options are refused
CHUNK = 8192  # rows hashed at a time
SEED_STEP = 1_000_003
MULTIPLIER = 6364136223846793005  # of hashes, that of Knuth's MMIX

Draw = Callable[[int, Generator], Examples]


@dataclass(frozen=True)
class DrawnTask(ArenaTask):
    """Describe a generated task. A subclass defines `draw`, or `segments` where a split has parts of different shape."""

    train: int = 12_800  # examples for training
    test: int = 1_280  # examples for test, and as many for validation
    seed: int = 1

    def check(self) -> None:
        """Refuse splits without examples."""
        check_positive("train", self.train)
        check_positive("test", self.test)
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be from 0 to 2147483647, not {self.seed!r}")

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:
        """Draw examples of a split; two calls may return the same one."""
        raise NotImplementedError

    def segments(self, part: ExamplesPart) -> list[tuple[int, Draw]]:
        """Return numbers of examples with the functions that draw them."""
        count = self.train if part == "train" else self.test
        return [(count, lambda rows, generator: self.draw(part, rows, generator))]

    def examples(self, part: ExamplesPart) -> Examples:
        """Return one split, drawn with a seed of its own; an example of a split in front of it is drawn again."""
        taken = torch.empty(0, dtype=torch.int64)
        for place, name in enumerate(DRAW_ORDER):
            generator = Generator().manual_seed(self.seed * SEED_STEP + place)
            found = padded_together([_unseen(draw, count, generator, taken, str(self)) for count, draw in self.segments(name)])
            if name == part:
                return found
            taken = torch.cat([taken, row_hashes(found.tokens)])
        raise ValueError(f"a split is train, val or test, not {part!r}")


def _unseen(draw: Draw, count: int, generator: Generator, taken: Tensor, what: str) -> Examples:
    """Draw examples until `count` of them are not among those taken."""
    parts: list[Examples] = []
    missing = count
    for _ in range(REDRAWS):
        drawn = draw(missing, generator)
        new = ~torch.isin(row_hashes(drawn.tokens), taken)
        parts.append(drawn if new.all() else select_examples(drawn, new))
        missing -= int(new.sum())
        if missing == 0:
            return padded_together(parts)
    raise ValueError(f"{what} has too few different examples for three splits without a common one: {missing:,} are missing")


def row_hashes(tokens: Tensor) -> Tensor:
    """Map each row to 64 bits. Equal rows have equal hashes, whatever padding is behind them."""
    flat = tokens.flatten(1)
    weights = torch.full((flat.shape[1],), MULTIPLIER).cumprod(0)  # modulo 2 ** 64
    return torch.cat([(chunk.long() * weights).sum(1) for chunk in flat.split(CHUNK)])


def padded_together(parts: Sequence[Examples]) -> Examples:
    """Join examples whose lengths may differ: padding is 0 behind tokens, IGNORED behind targets."""
    if len(parts) == 1:
        return parts[0]
    sizes = [part.tokens.shape[-1] for part in parts]
    longest = max(sizes)
    tokens = torch.cat([_padded(part.tokens, longest, 0) for part in parts])
    targets = torch.cat([_padded(part.targets, longest, IGNORED) for part in parts])
    slices = {name: torch.cat([_padded(part.slices[name], longest, 0) for part in parts]) for name in parts[0].slices}
    if min(sizes) == longest:
        return Examples(tokens, targets, None, slices)
    lengths = torch.cat([torch.full((len(part.tokens),), size) for part, size in zip(parts, sizes, strict=True)])
    return Examples(tokens, targets, lengths.to(torch.int32), slices)


def _padded(rows: Tensor, longest: int, value: int) -> Tensor:
    """Append a value to rows of tokens; one number per example stays as it is."""
    return rows if rows.dim() == 1 else torch.nn.functional.pad(rows, (0, longest - rows.shape[-1]), value=value)


def small_integers(values: Tensor, top: int, *, signed: bool = False) -> Tensor:
    """Return values from 0 to top (or IGNORED, where signed) in the smallest type that holds them."""
    fits = ((torch.uint8, 255, False), (torch.int16, 32767, True), (torch.int32, 2**31 - 1, True))
    return values.to(next(kind for kind, limit, negative in fits if top <= limit and negative >= signed))


def distinct_numbers(rows: int, count: int, choices: int, generator: Generator) -> Tensor:
    """Draw `count` different numbers below `choices` for each row, in random order: (rows count).

    Numbers that occur a second time in their row are drawn again. No number is treated unlike another, so that all ordered
    selections are equally frequent.
    """
    if choices <= 4 * count:
        return torch.rand(rows, choices, generator=generator).argsort(1)[:, :count]
    numbers = torch.randint(choices, (rows, count), generator=generator)
    open_rows = torch.arange(rows)
    while len(open_rows):
        part = numbers[open_rows]
        again = previous_places(part) >= 0
        part[again] = torch.randint(choices, (int(again.sum()),), generator=generator)
        numbers[open_rows] = part
        open_rows = open_rows[again.any(1)]
    return numbers


def previous_places(ids: Tensor) -> Tensor:
    """Return for each entry of a row the index of the latest earlier entry equal to it, -1 where there is none: (rows n)."""
    ordered, places = ids.sort(dim=1, stable=True)
    before = torch.full_like(places, -1)
    before[:, 1:] = torch.where(ordered[:, 1:] == ordered[:, :-1], places[:, :-1], -1)
    return torch.empty_like(before).scatter_(1, places, before)


def first_places(ids: Tensor) -> Tensor:
    """Return for each entry of a row the index of the first entry equal to it: (rows n)."""
    ordered, places = ids.sort(dim=1, stable=True)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = torch.where(begins, torch.arange(ids.shape[1]), 0).cummax(1).values
    return torch.zeros_like(places).scatter_(1, places, places.gather(1, group))


def log_buckets(values: Tensor, least: int) -> Tensor:
    """Round down to a power of two; what lies below `least`, a power of two itself, is 0."""
    return torch.where(values < least, 0, power_of_two(values))
