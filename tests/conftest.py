"""What every test can lean on: the device, the catalogue's examples as cases, data from a seed."""

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

if gc.isenabled():  # not before all tests are collected: modules and tests stay, and searches for garbage among them take long
    gc.disable()
if os.environ.get("REGARD_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run in its interpreter

import pytest
import torch
from hypothesis import HealthCheck, settings

from regard.catalogue import CATALOGUE
from regard.catalogue_row import Example, Row
from regard.data import synthetic
from regard.laws import LAWS, DoesNotApply
from regard.laws.law_case import LAW_HEADS, LAW_WIDTH, Case, random_tokens, random_valid, seed_torch
from regard.mixers.base import Can
from regard.ops.budget import DEFAULT, DEVICES
from regard.ops.triton_support import has_triton, read_tables_again
from regard.ops.tuned_table import OWN_TABLE
from regard.spec import Spec

DEVICE = torch.device(os.environ.get("REGARD_DEVICE", "cpu"))
WIDTH, HEADS = LAW_WIDTH, LAW_HEADS

if has_triton() and os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import quicken

    quicken()

settings.register_profile("regard", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("regard")


ROWS = len(CATALOGUE)
MANY = 1000  # tests of a session: so many are those of the whole suite


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run a part of all tests, such as the second of three: --part 2/3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one part: neighbours, which share compiled kernels."""
    given = config.getoption("part")
    number, _, count = given.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part is a number of a part and how many there are, such as 2/3, not {given!r}")
    first, last = (len(items) * place // int(count) for place in (int(number) - 1, int(number)))
    config.hook.pytest_deselected(items=items[:first] + items[last:])
    items[:] = items[first:last]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Search for garbage from here on, among what tests make, and less often: it was a tenth of the time of the suite."""
    if len(session.items) > MANY:
        import torch._dynamo  # noqa: F401 - the first update or compiled layer imports these thousand modules anyway
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Take rows out of the catalogue that a test registered: others run over all of them."""
    for name in list(CATALOGUE)[ROWS:]:
        del CATALOGUE[name]


@pytest.fixture(autouse=True)
def _same_seed():
    seed_torch(DEVICE)
    random.seed(0)


@pytest.fixture
def set_limits(monkeypatch):
    """Change tuning constants of every device for one test, see `regard.ops.budget`: set_limits(strip=1 << 10)."""

    def change(**fields):
        for kind in ("cpu", "cuda"):
            monkeypatch.setitem(DEVICES, kind, replace(DEVICES.get(kind, DEFAULT), **fields))

    return change


@pytest.fixture
def shipped_tables(monkeypatch):
    """Begin and end a test with the shipped table of kernel configurations, whatever REGARD_TUNED names."""
    monkeypatch.delenv(OWN_TABLE, raising=False)
    read_tables_again()
    yield
    monkeypatch.undo()
    read_tables_again()


@pytest.fixture(scope="module")
def few_strings():
    """Tasks on strings draw 300 training examples instead of 10,000: enough for runs of four updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "string_pairs", partial(synthetic.string_pairs, train=300, val=50, test=50))
        yield


def case_of(row: Row, example: Example, positions: str | None = None) -> Case:
    """One example of one row of the catalogue."""
    return Case(Spec(row.name, **example.options), example, positions, device=DEVICE)


def placed(name: str, number: int, positions: str) -> Case:
    """An example of a row with positions that act inside it."""
    row = CATALOGUE[name]
    example = row.examples[number]
    valued = positions.startswith("relative") and "values=False" not in positions  # adds to the answer, whatever the values are
    return case_of(row, replace(example, weights=example.weights and not valued), positions)


CASES = [case_of(row, example) for row in CATALOGUE.values() for example in row.examples]
CASES += [
    placed("softmax", 0, "rotary"),
    placed("softmax", 0, "alibi"),
    placed("softmax", 0, "relative(clip=4)"),
    placed("additive", 0, "relative(clip=3, values=False)"),
    placed("relu", 0, "alibi"),
    placed("sparse", 0, "relative(clip=4)"),
    placed("sparse", 5, "alibi"),
    placed("longformer", 0, "rotary"),
    placed("longformer", 1, "relative(clip=5)"),
    placed("bigbird", 0, "relative(clip=9)"),
]


# Examples that differ from another one by a number, a pattern, or what two others have already: all laws hold for them, and
# what follows from the same lines of code (compiling, transforms, running backwards) is tested with the one that covers them.
DOUBLES = {
    "softmax(scale=1.0)": "softmax",
    "relu(norm='sum')": "relu(norm='count')",
    "gat(pattern=PerHead([Local(3) | Global(first=1), Dilated(3, 2)]), v2=True)": "gat(pattern=Local(4))",
    "sparse(pattern=Dilated(4, 3))": "sparse(pattern=Local(8) | Global(first=2))",
    "sparse(pattern=Stride(7))": "sparse(pattern=Local(8) | Global(first=2))",
    "sparse(pattern=Truncated(5, 2))": "sparse(pattern=Local(8) | Global(first=2))",
    "sparse(pattern=Blocks(8))": "sparse(pattern=Local(8) | Global(first=2))",
    "longformer(attention_window=14, first=2, shared=True)": "sparse(pattern=Local(8) | Global(first=2))",
    "longformer(window=8, first=2) + rotary": "softmax + rotary",
    "longformer(window=4, dilation=3, dilated_heads=2, at=[0, 5]) + relative(clip=5)": "softmax + relative(clip=4)",
    "bigbird(block=8, globals=1, random=0)": "bigbird(block=8, globals=1, random=2)",
    "bigbird(block=8, globals=2, random=1, special='ends')": "bigbird(block=8, globals=1, random=2)",
    "retention(power=2, norm=False)": "retention",
    "performer(features=32, kind='positive', max_norm=None)": "performer(features=32)",
    "delta(activation='none')": "delta",
    "hybrid(pattern=Local(8), far='delta(gated=True)')": "delta(gated=True)",
    "fnet(norm='none')": "fnet",
    "conv(kernel=3, dilation=4)": "conv(kernel=5)",
    "reformer(rounds=3, buckets=8, chunk=2)": "reformer(rounds=2, buckets=4, chunk=6)",
    "synthesizer(form='random', frozen=True)": "synthesizer(form='random')",
    "nystrom(landmarks=6, conv=3)": "nystrom(landmarks=8)",
}  # and the case that covers it
PATHS = [case for case in CASES if repr(case) not in DOUBLES]


# Positions that act inside attention, with every row that claims them: for the laws. The other files take those of CASES.
INSIDE = {"rotary": Can.ROTARY, "alibi": Can.RELATIVE, "relative(clip=4)": Can.RELATIVE}


def first_claiming(row: Row, claim: Can) -> int | None:
    """Number of the first example of a row that makes a claim."""
    return next((i for i, example in enumerate(row.examples) if case_of(row, example).can(claim)), None)


def product_of_positions() -> list[Case]:
    """One case for each pair of a row and the positions that it claims."""
    found = [(row, where, first_claiming(row, claim)) for where, claim in INSIDE.items() for row in CATALOGUE.values()]
    return [placed(row.name, number, where) for row, where, number in found if number is not None]


_LISTED = {repr(case) for case in CASES}
LAW_CASES = CASES + [case for case in product_of_positions() if repr(case) not in _LISTED]


def asked(fits, cases: list[Case] = CASES):
    """The cases that fit."""
    return pytest.mark.parametrize("case", [c for c in cases if fits(c)], ids=repr)


def claiming(claim: Can, core: bool = False, cases: list[Case] = CASES, **dims):
    """The cases that make a claim, when built like this."""
    return asked(lambda c: c.can(claim, core, **dims), cases)


def law_test(holds, cases: list[Case] = CASES, unfit=lambda _: False):
    """A test of a law of the package, with all of its sizes and the cases that claim what it is about; `unfit`: and have nothing
    to check, which the law must see too.
    """
    law = LAWS[holds.__name__]
    params = [
        pytest.param(case, given, id="-".join([*map(str, given.values()), repr(case)]))
        for given in law.given
        for case in cases
        if law.fits(case)
    ]

    @pytest.mark.parametrize(("case", "given"), params)
    def run(case, given):
        try:
            law.holds(case, **given)
        except DoesNotApply:
            assert unfit(case)
        else:
            assert not unfit(case)

    run.law = law
    return run


every = asked(lambda _: True)
each_path = asked(lambda case: repr(case) not in DOUBLES, PATHS)
every_core = claiming(Can.NOTHING, core=True)


modes = Case.modes


def data(n: int, seed: int = 1, b: int = 3, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return random_tokens(n, seed, b, width, dtype, DEVICE)


def some(b: int, n: int, seed: int = 4, share: float = 0.7) -> torch.Tensor:
    """A random valid mask with at least one real token in each row."""
    return random_valid(b, n, seed, share, DEVICE)


def close(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def compiled_passes(mixer: torch.nn.Module, lengths: tuple[int, ...]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Outputs and all gradients of a layer, as one graph for all lengths and then without a compiler, length by length."""
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in lengths:
        x = torch.randn(1, n, mixer.dims.width, device=DEVICE, requires_grad=True)
        outputs = [f(x) for f in (compiled, mixer)]
        yield tuple([y, *torch.autograd.grad(y.sin().sum(), [x, *mixer.parameters()])] for y in outputs)
