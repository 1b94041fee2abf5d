"""In-context recall of MAD, plain, with noise, and fuzzy: keys and values of one or of several tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import Examples, ExamplesPart
from regard.arena.example_draws import distinct_numbers, first_places, log_buckets, previous_places
from regard.arena.mad_tasks import MadTask, targets_of_part
from regard.arena.token_floors import commonest_so_far
from regard.options import check_positive


@dataclass(frozen=True)
class MadRecall(MadTask):
    """Recall the value that a key has in this sequence. The lower half of the symbols are keys, the upper half values."""

    name = "mad_recall"
    title = "MAD: in-context recall"

    def check(self) -> None:
        """Refuse lengths that are no sequence of pairs, and vocabularies without keys."""
        super().check()
        if self.length < 4 or self.length % 2:
            raise ValueError(f"length must be an even number of at least 4, not {self.length}")
        if self.symbols - self.noise_symbols < 4:
            raise ValueError(f"symbols must be at least {4 + self.noise_symbols}, not {self.symbols}")

    @property
    def noise_symbols(self) -> int:
        """Return the number of ids that are noise."""
        return 0

    @property
    def noise_share(self) -> float:
        """Return the share of pairs that are noise."""
        return 0.0

    @property
    def keys(self) -> int:
        """Return the number of keys."""
        return (self.symbols - self.noise_symbols) // 2

    @property
    def answers(self) -> int:
        """Return the number of values."""
        return self.symbols - self.noise_symbols - self.keys

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:
        """Draw pairs; the last repeats a key of the sequence. A slice: the distance to the value, in powers of two."""
        pairs = self.length // 2
        value_of = torch.randint(self.answers, (count, self.keys), generator=generator)
        keys = torch.randint(self.keys, (count, pairs), generator=generator)
        noise = self._noise(count, pairs, generator)
        shown = torch.zeros(count, self.keys).scatter_reduce_(1, keys[:, :-1], (~noise[:, :-1]).float(), "amax")
        keys[:, -1] = (shown * (1 + torch.rand(shown.shape, generator=generator))).argmax(1)
        values = 1 + self.keys + value_of.gather(1, keys)
        tokens = torch.stack([1 + keys, values], -1)
        first = 1 + self.keys + self.answers
        hidden = torch.randint(first, max(first + 1, self.vocab), tokens.shape, generator=generator)
        tokens = torch.where(noise[..., None], hidden, tokens).flatten(1)
        before = previous_places(torch.where(noise, -1 - torch.arange(pairs), keys))
        scored = torch.stack([torch.zeros_like(noise), before >= 0], -1).flatten(1)
        distance = log_buckets(2 * (torch.arange(pairs) - before) - 1, 1).repeat_interleave(2, 1)
        slices = {} if part == "train" else {"distance": distance}
        return self.made(tokens, targets_of_part(tokens, scored, part), slices)

    def _noise(self, count: int, pairs: int, generator: Generator) -> Tensor:
        """Choose the pairs that are noise: neither the last nor one more."""
        noise = torch.rand(count, pairs, generator=generator) < self.noise_share
        spared = torch.randint(pairs - 1, (count, 1), generator=generator)
        return noise.scatter_(1, spared, False).index_fill_(1, torch.tensor([pairs - 1]), False)

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; `commonest of it` is the commonest value of the sequence so far."""
        first = 1 + self.keys
        return {**super().floors(), "commonest of it": commonest_so_far(self.examples("test"), first, first + self.answers)}


@dataclass(frozen=True)
class MadNoisyRecall(MadRecall):
    """Recall the value that a key has in this sequence, where some pairs are two tokens of noise."""

    name = "mad_noisy_recall"
    title = "MAD: noisy in-context recall"

    symbols: int = 32  # ids beside padding, those of noise included
    noise_symbols: int = 16  # ids that are noise
    noise_share: float = 0.2  # of the pairs

    def check(self) -> None:
        """Refuse noise without tokens, and sequences of nothing else."""
        check_positive("noise_symbols", self.noise_symbols)
        if not 0 <= self.noise_share < 1:
            raise ValueError(f"noise_share must be from 0 to below 1, not {self.noise_share!r}")
        super().check()


class Motifs(NamedTuple):
    """Hold pairs for each example: tokens of keys and values (count pairs size), their sizes, and the number of each key."""

    keys: Tensor
    values: Tensor
    key_sizes: Tensor
    value_sizes: Tensor
    numbers: Tensor

    def gather(self, index: Tensor) -> Motifs:
        """Return the pairs of an index (count pairs)."""
        return Motifs(*(x.take_along_dim(index[..., None] if x.dim() == 3 else index, 1) for x in self))


@dataclass(frozen=True)
class MadFuzzyRecall(MadTask):
    """Recall values of several tokens by keys of several tokens, all different in one motif. In test, keys are of full size.

    Sequences are filled from the right; the last symbol fills what is left over. A key that is recalled at the end was always
    shown before.
    """

    name = "mad_fuzzy_recall"
    title = "MAD: fuzzy in-context recall"

    key_size: int = 3  # most tokens of a key
    value_size: int = 3  # most tokens of a value

    def check(self) -> None:
        """Refuse motifs without tokens, and lengths without room for them."""
        super().check()
        check_positive("key_size", self.key_size)
        check_positive("value_size", self.value_size)
        least = 1 + 2 * max(self.key_size, self.value_size)
        if self.symbols < least:
            raise ValueError(f"motifs of different tokens need symbols of at least {least}, not {self.symbols}")
        if self.length <= 2 * (self.key_size + self.value_size):
            raise ValueError(f"length must be above {2 * (self.key_size + self.value_size)}, not {self.length}")

    @property
    def keys(self) -> int:
        """Return the number of tokens of keys."""
        return (self.symbols - 1) // 2

    @property
    def answers(self) -> int:
        """Return the number of tokens of values."""
        return self.symbols - 1 - self.keys

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:
        """Draw pairs until a sequence is full, one of them the pair that is recalled at the end."""
        drawn = self._motifs(count, self.length // 2 + 1, generator, full_keys=part != "train")
        return self._written(part, *self._with_probe(drawn, generator))

    def _motifs(self, count: int, pairs: int, generator: Generator, *, full_keys: bool) -> Motifs:
        """Draw pairs for each example; equal keys have the value of the first of them."""
        shape = (count, pairs)
        keys = distinct_numbers(count * pairs, self.key_size, self.keys, generator).view(*shape, -1)
        values = distinct_numbers(count * pairs, self.value_size, self.answers, generator).view(*shape, -1)
        least = self.key_size if full_keys else 1
        key_sizes = torch.randint(least, self.key_size + 1, shape, generator=generator)
        value_sizes = torch.randint(1, self.value_size + 1, shape, generator=generator)
        keys = (1 + keys).masked_fill(torch.arange(self.key_size) >= key_sizes[..., None], 0)
        numbers = (keys * (self.keys + 1) ** torch.arange(self.key_size)).sum(-1)
        first = first_places(numbers)
        values = 1 + self.keys + values.take_along_dim(first[..., None], 1)
        return Motifs(keys, values, key_sizes, value_sizes.gather(1, first), numbers)

    def _with_probe(self, drawn: Motifs, generator: Generator) -> tuple[Motifs, Tensor]:
        """Place the first pair, the probe, among the others unless its key is there, and at the end. Return the pairs in use."""
        count, pairs = drawn.numbers.shape
        sizes = drawn.key_sizes + drawn.value_sizes
        limit = self.length - sizes[:, :1] - (self.key_size + self.value_size)  # no pair begins behind it
        begins = sizes[:, 1:].cumsum(1) - sizes[:, 1:]
        wished = (torch.rand(count, 1, generator=generator) * (self.length - 2 * sizes[:, :1])).floor()
        place = (begins < wished).sum(1, keepdim=True).minimum((begins < limit).sum(1, keepdim=True) - 1)
        order = torch.arange(1, pairs + 1).expand(count, pairs).clone()
        order[:, -1] = 0
        shown = (drawn.numbers[:, 1:] == drawn.numbers[:, :1]) & (torch.arange(pairs - 1) < place)
        order.scatter_(1, place, torch.where(shown.any(1, keepdim=True), order.gather(1, place), 0))
        laid = drawn.gather(order)
        sizes = laid.key_sizes + laid.value_sizes
        used = sizes.cumsum(1) - sizes < limit
        used[:, -1] = True
        return laid, used

    def _written(self, part: ExamplesPart, laid: Motifs, used: Tensor) -> Examples:
        """Write the pairs in use behind each other, and score values of keys that came before."""
        sizes = (laid.key_sizes + laid.value_sizes) * used
        ends = sizes.cumsum(1)
        begins = ends - sizes + self.length + 1 - ends[:, -1:]
        tokens = torch.full((len(used), self.length + 2), self.symbols)
        scored = torch.zeros_like(tokens, dtype=torch.bool)
        before = previous_places(torch.where(used, laid.numbers, -1 - torch.arange(used.shape[1]))) >= 0
        motifs = ((laid.keys, laid.key_sizes, begins), (laid.values, laid.value_sizes, begins + laid.key_sizes))
        for motif, size, begin in motifs:
            each = torch.arange(motif.shape[-1])
            inside = used[..., None] & (each < size[..., None])
            places = torch.where(inside, begin[..., None] + each, self.length + 1).flatten(1)
            tokens.scatter_(1, places, motif.flatten(1))
            scored.scatter_(1, places, (before & (motif is laid.values))[..., None].expand_as(motif).flatten(1))
        whole = tokens[:, : self.length + 1]
        targets = targets_of_part(whole, scored[:, : self.length + 1], part)
        return self.made(whole[:, :-1], targets[:, :-1])

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; `commonest of it` is the commonest token of values in the sequence so far."""
        first = 1 + self.keys
        return {**super().floors(), "commonest of it": commonest_so_far(self.examples("test"), first, first + self.answers)}
