"""Cora in pickles of Python 2, as Planetoid has it: converted, and refused where a pickle asks for more than numbers."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from regard.data import array_pickles
from regard.data.array_pickles import pickled_array, pickled_lists, pickled_rows
from regard.data.cora_download import cora_arrays
from regard.data.labelled_graph import read_cora
from regard.data.text_files import DataError
from test_cli import refused, run

TRAIN, KNOWN, TESTED, WORDS = 7, 520, 9, 12  # papers of x, allx and tx


def text(value: bytes) -> bytes:
    """The opcode of a string of Python 2."""
    return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def array(value: np.ndarray) -> bytes:
    """The opcodes of an array, as NumPy writes them in protocol 2 of Python 2."""
    code = value.dtype.str[1:].encode()
    kind = b"cnumpy\ndtype\n" + text(code) + b"K\x00K\x01\x87R(K\x03" + text(b"<") + b"NNN" + integer(-1) * 2 + b"K\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    return made + b"(K\x01(" + b"".join(map(integer, value.shape)) + b"t" + kind + b"\x89" + text(value.tobytes()) + b"tb"


def matrix(dense: np.ndarray, *, shape: tuple[int, int] | None = None) -> bytes:
    """The opcodes of a csr_matrix."""
    ends = np.cumsum([0, *dense.sum(1)]).astype("<i4")
    fields = {b"indptr": ends, b"indices": dense.nonzero()[1].astype("<i4"), b"data": np.ones(int(ends[-1]), "<f4")}
    rows, columns = shape or dense.shape
    sized = text(b"format") + text(b"csr") + text(b"_shape") + integer(rows) + integer(columns) + b"\x86"
    return b"cscipy.sparse.csr\ncsr_matrix\n)\x81}(" + sized + b"".join(text(k) + array(v) for k, v in fields.items()) + b"ub"


def lists(graph: dict[int, list[int]]) -> bytes:
    rows = (integer(a) + b"](" + b"".join(map(integer, others)) + b"e" for a, others in graph.items())
    return b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(" + b"".join(rows) + b"u"


def whole(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def hot(labels: np.ndarray) -> np.ndarray:
    return np.eye(7, dtype="<i4")[labels]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a small graph, whose test papers are in another order."""
    rng = np.random.default_rng(0)
    words = rng.random((KNOWN + TESTED, WORDS)) < 0.3
    words[3] = words[-1] = False  # papers without words
    labels = rng.integers(0, 7, KNOWN + TESTED)
    order = KNOWN + rng.permutation(TESTED)
    graph = {node: [(node + 1) % len(words), int(rng.integers(len(words)))] for node in range(len(words))}
    graph[5] = [5, 6, 6, *graph[5]]  # one to itself, one twice
    folder = tmp_path / "planetoid/data"
    folder.mkdir(parents=True)
    for name, body in {
        "x": matrix(words[:TRAIN]),
        "allx": matrix(words[:KNOWN]),
        "tx": matrix(words[order]),
        "y": array(hot(labels[:TRAIN])),
        "ally": array(hot(labels[:KNOWN])),
        "ty": array(hot(labels[order])),
        "graph": lists(graph),
    }.items():
        (folder / f"ind.cora.{name}").write_bytes(whole(body))
        (folder / f"ind.citeseer.{name}").write_bytes(b"of another set")
    (folder / "ind.cora.test.index").write_text("".join(f"{place}\n" for place in order))
    np.savez(tmp_path / "wanted.npz", words=words, labels=labels, graph=[(a, b) for a, own in graph.items() for b in own])
    return folder.parent


def test_a_clone_becomes_arrays(clone: Path, tmp_path: Path) -> None:
    archive = tmp_path / "planetoid-master.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (clone / "data").iterdir():
            file.write(path, f"planetoid-master/data/{path.name}")
    done = run("prepare", "cora", str(clone), "--out", str(tmp_path / "a"))
    assert done.exit_code == 0 and "529 papers" in done.stdout and "regard train cora" in done.stdout
    for number, source in enumerate((archive, clone / "data")):
        assert run("prepare", "cora", str(source), "--out", str(tmp_path / str(number))).exit_code == 0
        assert (tmp_path / str(number) / "cora.npz").read_bytes() == (tmp_path / "a/cora.npz").read_bytes()
    found = read_cora(tmp_path / "a")
    with np.load(tmp_path / "wanted.npz") as archive:
        wanted = dict(archive)
    assert found.graph.words == [row.nonzero()[0].tolist() for row in wanted["words"]] and found.graph.vocabulary == WORDS
    assert found.graph.labels == wanted["labels"].tolist()
    assert found.graph.edges == sorted(
        {(min(a, b), max(a, b)): [int(min(a, b)), int(max(a, b))] for a, b in wanted["graph"] if a != b}.values()
    )
    assert found.nodes == {"train": [*range(7)], "val": [*range(7, 507)], "test": [*range(KNOWN, KNOWN + TESTED)]}


def test_scipy_is_not_needed(clone: Path) -> None:
    script = f"""
import sys
sys.modules["scipy"] = None
from pathlib import Path
from regard.data.cora_download import cora_arrays
print(cora_arrays(Path({str(clone)!r}))["cora.npz"].amount)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("529 papers")


def test_arrays_of_newer_pickles() -> None:
    for value in (np.arange(6, dtype="<i8").reshape(2, 3), np.asfortranarray(np.ones((3, 2), ">f4")), np.zeros(0, "u1")):
        found = pickled_array(pickle.dumps(value, 4), "here")
        assert (found == value).all() and found.dtype == value.dtype
    assert pickled_lists(pickle.dumps({1: [2, 3]}), "here") == {1: [2, 3]}
    scipy_sparse = pytest.importorskip("scipy.sparse")
    ends, columns, numbers, width = pickled_rows(pickle.dumps(scipy_sparse.csr_matrix(np.eye(3)), 4), "here")
    assert (ends.tolist(), columns.tolist(), numbers.tolist(), width) == ([0, 1, 2, 3], [0, 1, 2], [1.0] * 3, 3)


class Hostile:
    """A pickle of it makes a folder where it is loaded."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.call = call, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_and_runs_nothing(clone: Path, tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (os.system, (f"mkdir {trace}",)),
        (subprocess.check_call, (["mkdir", str(trace)],)),
        (eval, (f"__import__('os').mkdir({str(trace)!r})",)),
        (os.mkdir, (str(trace),)),
        (np.save, (str(trace), 1)),
        (getattr, (np, "save")),
    ]
    for call, args in calls:
        raw = pickle.dumps(Hostile(call, *args), protocol) if call is not getattr else b"c__builtin__\ngetattr\n."
        for name in ("graph", "allx", "ty"):
            file = clone / "data" / f"ind.cora.{name}"
            whole_file = file.read_bytes()
            file.write_bytes(raw)
            with pytest.raises(DataError, match=rf"ind\.cora\.{name} is refused: it names \w+(\.\w+)*\.{call.__name__}, and"):
                cora_arrays(clone)
            file.write_bytes(whole_file)
    (clone / "data/ind.cora.graph").write_bytes(pickle.dumps(Hostile(os.system, f"mkdir {trace}"), protocol))
    said = refused("prepare", "cora", str(clone), "--out", str(tmp_path / "out"))
    assert f"it names {os.system.__module__}.system, and arrays, sparse matrices and lists do not need that" in said
    assert not trace.exists() and not (tmp_path / "out").exists()
    assert pickle.loads(pickle.dumps(Hostile(os.system, f"mkdir {trace}"), protocol)) == 0  # what it would have done
    assert trace.is_dir()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"(S'true'\nios\nsystem\n", "it names os.system"),  # INST
        (b"(cos\nsystem\nS'true'\no", "it names os.system"),  # OBJ
        (b"\x8c\x05posix\x8c\x06system\x93", "it names posix.system"),  # STACK_GLOBAL
        (b"cnumpy\nndarray.__subclasses__\n", r"it names numpy.ndarray.__subclasses__"),
        (b"cregard.data.array_pickles\npickle\n", "it names regard.data.array_pickles.pickle"),
        (b"ccopy_reg\n_reconstructor\n", "it names copy_reg._reconstructor"),
        (b"c__builtin__\nlist\n)R}U\x01aK\x01sb", "it gives a state to a type"),
        (b"c__builtin__\nlist\n}U\x01aK\x01sb", "is not a whole pickle"),  # a state for the class itself
        (b"ccollections\ndefaultdict\n)R}U\x01aK\x01sb", "it gives a state to a lists"),
        (b"Pname\n", "it names an object outside of it"),
        (b"K\x01Q", "it names an object outside of it"),
        (b"\x82\x01", "is not a whole pickle"),  # EXT1, of a registry that is empty
        (b"]N}U\x09__class__K\x01s\x86b", "is not a whole pickle"),  # attributes of a list
        (b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R", "it has an array of 'O8', which is no type of numbers"),
        (b"cnumpy\ndtype\nU\x02i4K\x00K\x01\x87R(K\x03U\x01!tb", "it has an array in an unknown order of bytes"),
        (array(np.arange(4, dtype="<i4"))[:-3] + b"tb", "is not a whole pickle"),
        (array(np.arange(4, dtype="<i4")).replace(integer(4), integer(5), 1), r"an array of shape \(5,\) and 16 bytes"),
        (array(np.arange(4, dtype="<i4")).replace(integer(4), integer(-1), 1), "it has an array without a shape"),
        (b"N", "holds no array of numbers"),
    ],
)
def test_other_ways_to_call_something_are_refused(body: bytes, sentence: str) -> None:
    before = {name: dict(vars(kind)) for name, kind in vars(array_pickles).items() if isinstance(kind, type)}
    with pytest.raises(DataError, match=sentence):
        pickled_array(whole(body), "here")
    assert {name: dict(vars(kind)) for name, kind in vars(array_pickles).items() if isinstance(kind, type)} == before


def test_cut_off_pickles_are_refused(clone: Path) -> None:
    raw = (clone / "data/ind.cora.x").read_bytes()
    for size in range(0, len(raw), 7):
        with pytest.raises(DataError, match=r"^here "):
            pickled_rows(raw[:size], "here")


def test_files_that_do_not_fit_are_refused(clone: Path, tmp_path: Path) -> None:
    def sentence(name: str, raw: bytes | None) -> str:
        path = clone / "data" / f"ind.cora.{name}"
        kept = path.read_bytes()
        path.unlink() if raw is None else path.write_bytes(raw)
        said = refused("prepare", "cora", str(clone), "--out", str(tmp_path / "out"))
        path.write_bytes(kept)
        assert not (tmp_path / "out").exists()
        return said

    some = np.ones((KNOWN, WORDS), bool)
    assert "has no ind.cora.tx, ind.cora.graph" not in sentence("tx", None)
    assert "has no ind.cora.tx: is it a clone of planetoid?" in sentence("tx", None)
    assert "ind.cora.test.index does not have the numbers 520 to 528, each once" in sentence("test.index", b"520\n521\n")
    assert "ind.cora.ally has 519 labels for 520 papers" in sentence("ally", whole(array(hot(np.zeros(519, int)))))
    assert "ind.cora.ally does not have a one in each row" in sentence("ally", whole(array(np.ones((KNOWN, 7), "<i4"))))
    assert "ind.cora.allx: its rows do not fit its shape of 520 x 3" in sentence("allx", whole(matrix(some, shape=(KNOWN, 3))))
    assert "ind.cora.allx: its rows do not fit" in sentence("allx", whole(matrix(some, shape=(KNOWN + 1, WORDS))))
    assert "are not of one data set" in sentence("allx", whole(matrix(np.ones((KNOWN, WORDS + 1), bool))))
    assert "ind.cora.graph does not have citations between 529 papers" in sentence("graph", whole(lists({0: [529]})))
    assert "ind.cora.graph holds no lists of numbers by number" in sentence("graph", pickle.dumps({0: ["a"]}))
    assert "ind.cora.allx holds no sparse matrix by rows" in sentence("allx", whole(array(np.ones((2, 2), "<f4"))))
