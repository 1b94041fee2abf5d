"""`regard show RUN FILE`: the attention of image models over patches, and of recognisers over a recording."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
import test_speech_tasks as speech
from regard.data.wav_files import write_wav
from regard.plots.patch_plot import draw_image_attention
from regard.plots.recording_plot import draw_recording_attention
from regard.tasks.image_attention import ImageAttention
from regard.tasks.recording_attention import RecordingAttention
from regard.tasks.text_attention import LayerAttention
from regard.tasks.trained_run import TrainedRun
from test_cli import PNG, refused, run
from test_own_images import SMALL, photo, write_photos

folder, _few_strings = speech.folder, speech._few_strings
STRINGS = {"ctc_weight": 0.5, "decoder_depth": 2, "mixer": "softmax", "normalise": "train"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("data") / "photos", 5)


def fitted(photos: Path, out: Path, **changes: object) -> TrainedRun:
    settings = {**SMALL, "steps": 1, "depth": 2, "folder": photos, **changes}
    if not settings["depth"]:
        settings = {key: value for key, value in settings.items() if key not in ("heads", "ffn")}
    return regard.train("images", out, device="cpu", quiet=True, **settings)


def some_image(mechanism: str = "softmax", *, front: int = 1, rows: int = 2, columns: int = 3, heads: int = 2) -> ImageAttention:
    """Attention that is all on the cell in row 2, column 3, but that of the class token, which is on row 1, column 2."""
    tokens = front + rows * columns
    weights = torch.zeros(heads, tokens, tokens)
    weights[:, :, front + 5], weights[:, 0] = 1, 0
    weights[:, 0, front + 1] = 1
    names = [str(i) for i in range(tokens)]
    layers = [LayerAttention(f"layer {i}", "self", mechanism, weights, names, names) for i in (1, 2)]
    grid = {"rows": rows, "columns": columns, "front": front, "covered": (1.0, 1.25), "picture": np.zeros((9, 9, 3), np.uint8)}
    return ImageAttention("a/photo.jpg", "cat", layers, ["layer 3: conv has no attention weights"], **grid)  # type: ignore[arg-type]


def test_maps_are_what_cells_receive_and_what_a_token_gives() -> None:
    found = some_image()
    received, given = found.received(found.layers[0]), found.given(found.layers[0], found.query_of(1, 1))
    assert received.shape == (2, 2, 3) and received[0].tolist() == [[0, 1, 0], [0, 0, 6]]  # of seven tokens
    assert given[1].tolist() == [[0, 0, 0], [0, 0, 7]] and found.given(found.layers[0], 0)[0, 0].tolist() == [0, 7, 0]
    assert [found.query_of(*cell) for cell in ((1, 1), (1, 3), (2, 3))] == [1, 3, 6]
    with pytest.raises(ValueError, match=r"there is no patch 3,1: they go from 1,1 to 2,3 \(row, column\)"):
        found.query_of(3, 1)


@pytest.mark.parametrize("heads", [1, 2, 12])
def test_a_picture_has_a_map_for_every_layer_and_head(heads: int, tmp_path: Path) -> None:
    figure = draw_image_attention(some_image(heads=heads), "runs/x", (2, 1))
    maps = [axes for axes in figure.axes if len(axes.images) == 2]
    assert len(maps) == 3 * 2 * (heads + (heads > 1))
    shades = [axes.images[1].get_array()[..., 3] for axes in maps]  # the opacity
    assert all(shade.shape == (2, 3) for shade in shades)
    cells = [divmod(int(shade.argmax()), 3) for shade in shades]
    third = len(maps) // 3
    assert cells == [(1, 2)] * third + [(0, 1)] * third + [(1, 2)] * third
    assert [len(axes.patches) for axes in maps] == [0] * 2 * third + [2] * third
    assert all(tuple(axes.images[1].get_extent()) == (0, 1.25, 1.0, 0) and axes.get_xlim() == (0, 1) for axes in maps)
    written = "\n".join(text.get_text() for text in figure.texts)
    for words in ("photo.jpg", "answer: cat\nruns/x", "What the patch in row 2, column 1 reads", "layer 3: conv has no"):
        assert words in written
    figure.savefig(tmp_path / "a.png")


def test_a_model_without_a_class_token_has_one_section() -> None:
    written = [text.get_text() for text in draw_image_attention(some_image(front=0)).texts]
    assert "What each patch receives" in written and "What the class token reads" not in written


def test_the_command_draws_the_attention_of_an_image_run(photos: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "run", tmp_path / "wide.jpg"
    found = fitted(photos, out, pool="token", mixer=["softmax", "conv"], dropout=0.2)
    photo("red", 1).resize((50, 30)).save(path)
    shown = run("show", str(out), str(path))
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.stdout.split())
    assert "layer 1 self, softmax: 2 heads, 17 x 17 tokens" in words and "no weights layer 2: conv has no" in words
    assert ".attention([path])" in words
    assert (out / "attention.png").read_bytes()[:8] == PNG and not [*out.glob(".*.part")]
    told = json.loads(run("show", str(out), str(path), "--json", "--out", str(tmp_path / "a.svg"), "--patch", "2,4").stdout)
    assert told["grid"] == [4, 4] and told["front"] == 1 and told["answer"] == found.predict([str(path)])[0]
    layer = told["layers"][0]
    assert layer["keys"][:6] == ["class token", "1,1", "1,2", "1,3", "1,4", "2,1"] and told["missing"][0].startswith(
        "layer 2: conv"
    )
    weights = torch.tensor(layer["weights"])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 17))
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert "there is no patch 5,1: they go from 1,1 to 4,4" in refused("show", str(out), str(path), "--patch", "5,1")
    assert "--patch is the row and the column of a patch" in refused("show", str(out), str(path), "--patch", "5")
    assert "there is no file none.jpg" in refused("show", str(out), "none.jpg")
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert "bad.png is not a whole image" in refused("show", str(out), str(tmp_path / "bad.png"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"depth": 0, "stem": "cnn(channels=4, stages=2, blocks=1)"}, "depth=0: there is no layer behind its stem that could"),
        ({"mixer": "mlp_mixer", "positions": "none"}, "has no layer with attention weights: layer 1: mlp_mixer has no"),
    ],
)
def test_models_without_weights_are_refused(changes: dict[str, object], sentence: str, photos: Path, tmp_path: Path) -> None:
    fitted(photos, tmp_path / "run", **changes)
    assert sentence in refused("show", str(tmp_path / "run"), str(photos / "red/1.png"))
    assert not (tmp_path / "run/attention.png").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer": "Neighbourhood(4, 1)", "positions": "rotary_2d", "gray": True},
        {"mixer": "linear", "stem": "conv(layers=2)"},
        {"mixer": "performer(features=8)", "pool": "smooth"},
        {"mixer": ["pooled_queries(rate=2)", "softmax"], "positions": "none"},
    ],
    ids=str,
)
def test_other_mechanisms_and_stems_are_drawn(changes: dict[str, object], photos: Path, tmp_path: Path) -> None:
    found = fitted(photos, tmp_path / "run", **changes).attention([str(photos / "blue/1.png")])[0]
    assert isinstance(found, ImageAttention)
    figure = draw_image_attention(found)
    pooled = "pooled" in str(changes)
    assert len([axes for axes in figure.axes if len(axes.images) == 2]) == (3 if pooled else 6)
    written = "\n".join(text.get_text() for text in figure.texts)
    assert ("layer 2: its keys are groups of patches" in written) == pooled
    figure.savefig(tmp_path / "a.png")


def test_the_command_draws_where_a_decoder_reads_a_recording(folder: Path, tmp_path: Path) -> None:
    speech.trained("fsdd_strings", folder, tmp_path / "run", **STRINGS)
    write_wav(tmp_path / "a.wav", speech.sound(1, 1, 3))
    out = str(tmp_path / "run")
    shown = run("show", out, str(tmp_path / "a.wav"))
    assert shown.exit_code == 0, shown.output
    assert "decoder 2 cross, softmax: 2 heads" in " ".join(shown.stdout.split())
    assert (tmp_path / "run/attention.png").read_bytes()[:8] == PNG
    told = json.loads(run("show", out, str(tmp_path / "a.wav"), "--json").stdout)
    cross = [layer for layer in told["layers"] if layer["kind"] == "cross"]
    assert len(cross) == 2 and told["token_seconds"] > 0 and cross[0]["keys"][0] == "0.00"
    assert "".join(cross[0]["queries"]) == told["answer"] + "<end>"
    weights = torch.tensor(cross[1]["weights"])
    assert weights.shape == (2, len(cross[0]["queries"]), len(cross[0]["keys"]))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    assert "--patch is for a run on images: leave it out" in refused("show", out, str(tmp_path / "a.wav"), "--patch", "1,1")
    assert "none.wav" in refused("show", out, "none.wav")


def test_an_aligner_is_drawn_with_the_weights_that_it_used(folder: Path, tmp_path: Path) -> None:
    task = speech.trained("fsdd_strings", folder, tmp_path / "run", **STRINGS, reader="location")
    write_wav(tmp_path / "a.wav", speech.sound(2, 0, 5))
    loaded = regard.load(tmp_path / "run", device="cpu")
    found = loaded.attention([str(tmp_path / "a.wav")])[0]
    assert isinstance(found, RecordingAttention)
    expected = loaded.task.alignment(loaded.model, str(tmp_path / "a.wav"))  # type: ignore[attr-defined]
    assert len(expected) == len(found.alignments) == 2 and task.config.reader == "location"
    for layer, weights in zip(found.alignments, expected, strict=True):
        torch.testing.assert_close(layer.weights, weights.float())
    figure = draw_recording_attention(found, "runs/x")
    shapes = [axes.images[0].get_array().shape for axes in figure.axes if axes.images]
    assert shapes.count(found.alignments[0].weights.shape[1:]) == 2 * 3 and shapes.count(tuple(found.mel.mT.shape)) == 3


def test_a_recogniser_without_a_decoder_has_its_encoder_drawn(folder: Path, tmp_path: Path) -> None:
    speech.trained("fsdd_strings", folder, tmp_path / "run", mixer="softmax")
    write_wav(tmp_path / "a.wav", speech.sound(1, 1, 3))
    found = regard.load(tmp_path / "run", device="cpu").attention([str(tmp_path / "a.wav")])[0]
    assert [(layer.name, layer.kind) for layer in found.layers] == [("layer 1", "self")]
    assert found.layers[0].keys[:2] == ["0.00", "0.04"] and draw_recording_attention(found).axes
