"""Tasks of images: augmentation, reading, training, answers, and what is refused."""

import io
import lzma
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Generator
from typer.testing import CliRunner

from regard import load
from regard.cli import app
from regard.cli.model_check import check_model
from regard.cli.settings import check_used
from regard.data.colour_images import (
    CIFAR_CLASSES,
    image_floors,
    read_colour_images,
    read_image,
    some_images,
    split_images,
)
from regard.data.gray_images import LabelledImages
from regard.data.text_files import DataError
from regard.tasks import config, make_task
from regard.training import image_augmentation as change
from regard.training import trivial_augment as trivial
from regard.training.fit import fit

TINY = {
    "width": 16, "heads": 2, "depth": 1, "ffn": 16, "steps": 6, "batch_tokens": 8, "warmup": 2, "validate_every": 3,
    "save_every": 3, "precision": "32", "dropout": 0.1,
}  # fmt: skip
MODELS = {
    "vit": {"stem": "patches(side=8)", "pool": "token", "positions": "rotary_2d"},
    "uneven patches": {"stem": "patches(side=5)", "positions": "relative_2d"},
    "mlp_mixer": {"stem": "patches(side=8)", "mixer": "mlp_mixer", "positions": "none"},
    "near on the grid": {"stem": "patches(side=4)", "mixer": "Neighbourhood(8, 1)"},
    "conv + attention": {"stem": "conv(layers=2)", "positions": "sinusoidal_2d"},
    "cnn": {"stem": "cnn(channels=4, stages=2, blocks=1)", "depth": 0},
    "hybrid": {"stem": "cnn(channels=4, stages=2, blocks=1, pool='max', norm='group')", "mixer": "linear"},
}


def pixels(label, number):
    """A square of the colour of a class, somewhere."""
    rng = np.random.default_rng(100 * label + number)
    image = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8)
    top, left = rng.integers(0, 16, 2)
    image[top : top + 16, left : left + 16] = (25 * label, 255 - 25 * label, 128)
    return image


def archive(path, *, files=None, each=(6, 2)):
    """Write a small archive of the ten classes; `files` are further ones, by name."""
    found = {}
    for part, count in zip(("train", "test"), each, strict=True):
        for label, name in enumerate(CIFAR_CLASSES):
            for number in range(count):
                data = io.BytesIO()
                Image.fromarray(pixels(label, number + 50 * (part == "test"))).save(data, "JPEG")
                found[f"{part}/{name}/{number:04}.jpg"] = data.getvalue()
    with lzma.open(path, "wb") as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in (found | (files or {})).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The data of both tasks, one in colour and one in gray."""
    where = tmp_path_factory.mktemp("data") / "cifar10"
    where.mkdir()
    archive(where / "cifar10_jpeg.tar.xz")
    for part, count in (("train", 40), ("test", 10)):
        images = np.stack([pixels(i % 10, i)[..., 0] for i in range(count)])
        np.save(where / f"gray_{part}_images.npy", images)
        np.save(where / f"gray_{part}_labels.npy", (np.arange(count) % 10).astype(np.uint8))
    return where


def tiny(folder, name="cifar10", **changes):
    made = make_task(config(name).replace({**TINY, **changes}))
    made.read(folder)
    return made


def dice(seed=0):
    return Generator().manual_seed(seed)


def test_a_crop_is_a_window_of_the_framed_image():
    images = torch.rand(6, 3, 8, 7)
    found = change.random_crop(images, 2, dice())
    framed = torch.nn.functional.pad(images, (2, 2, 2, 2))
    windows = [[framed[i, :, r : r + 8, c : c + 7] for r in range(5) for c in range(5)] for i in range(6)]
    places = [[torch.equal(found[i], window) for window in windows[i]].index(True) for i in range(6)]
    assert len(set(places)) > 1 and torch.equal(found, change.random_crop(images, 2, dice()))


def test_flips_and_squares_and_colours():
    images = torch.rand(64, 3, 8, 8)
    flipped = change.random_flip(images, dice())
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, images, strict=True)]
    assert 16 < sum(mirrored) < 48
    assert all(mirror or torch.equal(a, b) for mirror, a, b in zip(mirrored, flipped, images, strict=True))
    hidden = (change.cutout(images, 4, dice()) == 0.5).all(1)
    assert int(hidden.sum((1, 2)).max()) == 16 and int(hidden.sum((1, 2)).min()) >= 4
    gray = torch.full((4, 3, 2, 2), 0.4)
    scaled = change.scale_colours(gray, 0.5, dice())
    assert ((scaled >= 0.2 - 1e-6) & (scaled <= 0.6 + 1e-6)).all() and len(scaled[:, 0, 0, 0].unique()) == 4
    assert torch.allclose(scaled, scaled[:, :1])  # a gray image stays gray
    assert torch.equal(change.Augmentation().change(images), images)


def test_mixed_images_are_weighted_sums_of_two():
    images = torch.rand(32, 3, 4, 4)
    mixed = change.mixed(images, 0.5, 0.0, dice())
    wide = mixed.weight[:, None, None, None]
    torch.testing.assert_close(mixed.images, wide * images + (1 - wide) * images[mixed.other])
    assert sorted(mixed.other.tolist()) == list(range(32)) and ((mixed.weight >= 0) & (mixed.weight <= 1)).all()
    many = change.mixed(torch.zeros(4000, 1, 1, 1), 0.5, 0.0, dice()).weight
    assert abs(float(many.mean()) - 0.5) < 0.02 and abs(float(many.var()) - 1 / 8) < 0.01  # of Beta(a, a): 1 / (8 a + 4)


def test_cutmix_puts_a_rectangle_of_another_image_in():
    images = torch.rand(64, 3, 16, 12)
    cut = change.mixed(images, 0.0, 1.0, dice())
    other = (cut.images == images[cut.other]).all(1) & (cut.images != images).all(1)
    assert torch.equal(torch.where(other[:, None], images[cut.other], images), cut.images)
    box = other.any(2)[:, :, None] & other.any(1)[:, None]  # rows and columns of what was pasted
    assert torch.equal(box, other)
    apart = cut.other != torch.arange(64)
    torch.testing.assert_close(cut.weight[apart], 1 - other.float().mean((1, 2))[apart])
    many = change.mixed(torch.zeros(400, 1, 64, 64), 0.0, 1.0, dice()).weight
    assert abs(float(many.mean()) - (1 - (1 / 2 - 1 / 5 + 1 / 48))) < 0.03  # 1/2 if no rectangle were cut off at the edges


def test_with_both_half_of_the_images_are_blended():
    images = torch.rand(400, 3, 8, 8)
    mixed = change.mixed(images, 0.5, 1.0, dice())
    same, others = (mixed.images == images).all(1), (mixed.images == images[mixed.other]).all(1)
    pasted = (same | others).flatten(1).all(1)
    wide = mixed.weight[:, None, None, None]
    torch.testing.assert_close(mixed.images[~pasted], (wide * images + (1 - wide) * images[mixed.other])[~pasted])
    assert 150 < int(pasted.sum()) < 250


PILLOW = {  # what Pillow gives at strength 0.5, with a positive sign
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.45),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.45),
    "saturation": lambda image: ImageEnhance.Color(image).enhance(1.45),
    "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.45),
    "posterize": lambda image: ImageOps.posterize(image, 6),
    "solarize": lambda image: ImageOps.solarize(image, 128),
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
}


@pytest.mark.parametrize("name", PILLOW)
def test_operations_of_trivial_augment_are_those_of_pillow(name):
    image = Image.fromarray(pixels(3, 7))
    tensor, expected = (torch.tensor(np.asarray(x)).permute(2, 0, 1)[None].float() for x in (image, PILLOW[name](image)))
    tensor = tensor / 255
    half = torch.full((1, 1, 1, 1), 0.5)
    number = 1 + [x.__name__ for x in trivial.COLOUR_CHANGES].index(f"_{name}")
    found = 255 * trivial.changed(tensor, torch.full((1, 1, 1, 1), number), half, half)
    assert float((found - expected).abs().max()) <= (0.01 if name in ("posterize", "equalize") else 1.6)  # Pillow rounds twice
    assert not torch.equal(found, 255 * tensor)


def test_geometric_operations_move_pixels():
    image = torch.full((1, 3, 32, 32), 0.5)
    image[..., 10:14, 20:24] = 1.0

    def centre(number, signed):
        of = [torch.full((1, 1, 1, 1), x) for x in (number, abs(signed), signed)]
        mass = trivial.changed(image, *of)[0, 0] - 0.5
        rows, columns = torch.arange(32) - 15.5, torch.arange(32) - 15.5
        return float((mass.sum(1) * rows).sum() / mass.sum()), float((mass.sum(0) * columns).sum() / mass.sum())

    row, column = -4.0, 6.0
    assert centre(0, 1.0) == pytest.approx((row, column), abs=1e-4)
    assert centre(trivial.SHIFT_X, 0.5) == pytest.approx((row, column - 5), abs=1e-2)
    assert centre(trivial.SHIFT_Y, -0.5) == pytest.approx((row + 5, column), abs=1e-2)
    assert centre(trivial.SHEAR_X, 1.0) == pytest.approx((row, column - 0.3 * row), abs=0.1)
    assert centre(trivial.SHEAR_Y, 1.0) == pytest.approx((row - 0.3 * column, column), abs=0.1)
    turned = centre(trivial.ROTATION, 1.0)
    assert np.hypot(*turned) == pytest.approx(np.hypot(row, column), abs=0.1)
    cosine = (turned[0] * row + turned[1] * column) / (row**2 + column**2)
    assert cosine == pytest.approx(np.cos(np.pi / 6), abs=0.02)


def test_trivial_augment_draws_each_operation_for_its_share():
    gray = torch.rand(3000, 1, 8, 8)
    found = trivial.trivial_augment(gray, dice())
    same = (found == gray).flatten(1).all(1).float().mean()
    # 1 of 14 changes nothing, one more is the saturation of an image without colour, and a part of the other twelve
    assert 2 / 14 - 0.03 < float(same) < 4 / 14 and float(found.min()) >= 0 and float(found.max()) <= 1
    assert torch.equal(found, trivial.trivial_augment(gray, dice()))


def test_nothing_of_a_training_step_is_read_from_the_device(folder):
    made = tiny(folder, mixup=0.2, cutmix=1.0, trivial=True, cutout=8, colour=0.2, stem="patches(side=8)")
    with torch.device("meta"):
        model = made.model()
        batch = made.batch(made.splits["train"][:4]).to("meta")
        assert made.loss(model, batch, 1).total.is_meta


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_learns(folder, name):
    torch.manual_seed(0)
    made = tiny(folder, dropout=0.0, crop=0, flip=False, cutout=0, mixup=0.0, colour=0.0, **MODELS[name])
    check_model(make_task(made.config))
    model, batch = made.model(), made.batch(made.splits["train"][:20])
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(5):
        loss = made.loss(model, batch, 1).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("name", "model"), [("cifar10", "cnn"), ("cifar10_gray", "vit")])
def test_a_run_is_scored_and_answers_files(folder, tmp_path, name, model):
    settings = {**MODELS[model], "mixup": 0.2, "cutmix": 1.0, "trivial": True, "cutout": 8, "colour": 0.2}
    fit(tiny(folder, name, **settings), tmp_path / "run", accelerator="cpu", quiet=True)
    run = load(tmp_path / "run")
    scores = run.evaluate("test", folder)
    assert scores["images"] == {"cifar10": 20, "cifar10_gray": 10}[name] and 0 <= scores["accuracy"] <= 100
    Image.fromarray(pixels(3, 1)).resize((60, 40)).save(tmp_path / "a.png")
    answers = run.predict([str(tmp_path / "a.png"), "", str(tmp_path / "a.png")])
    assert answers[0] in CIFAR_CLASSES and answers == [answers[0], "", answers[0]]
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff no image")
    for wrong, why in ((tmp_path / "bad.jpg", "bad.jpg is not a whole image"), (tmp_path / "none.png", "there is no file")):
        with pytest.raises(ValueError, match=why):
            run.predict([str(wrong)])
    (tmp_path / "a.mp3").write_bytes(b"ID3\0\xff")
    out = str(tmp_path / "a.wav")
    for words, why in (
        ([str(tmp_path / "a.mp3")], "a.mp3 is no file of .png, .jpg"),
        ([str(tmp_path / "a.mp3"), "--out", out], f"--out is for speech that a run makes of a text, not for {name}"),
    ):
        refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), *words])
        assert refused.exit_code == 2 and why in " ".join(refused.output.split()), refused.output


def test_two_views_are_the_mean_over_an_image_and_its_mirror_image(folder):
    task = tiny(folder, **MODELS["vit"])
    model, images = task.model().eval(), torch.rand(5, 3, 32, 32)
    with torch.no_grad():
        one, mirrored = (task.pixel_scores(model, x).softmax(-1) for x in (images, images.flip(-1)))
        two = tiny(folder, **MODELS["vit"], views=2).pixel_scores(model, images)
        back = tiny(folder, **MODELS["vit"], views=2).pixel_scores(model, images.flip(-1))
    torch.testing.assert_close(two.exp(), (one + mirrored) / 2)
    torch.testing.assert_close(two, back)
    assert (one - mirrored).abs().max() > 1e-4


def test_a_run_is_evaluated_with_both_views_without_training_it_again(folder, tmp_path):
    fit(tiny(folder, **MODELS["vit"]), tmp_path, accelerator="cpu", quiet=True)
    run = load(tmp_path, views=2)
    assert run.config.views == 2 and run.evaluate("test", folder)["images"] == 20


def test_an_interrupted_run_has_the_weights_of_one_that_was_not(folder, tmp_path):
    settings = {**MODELS["cnn"], "mixup": 0.2}
    fit(tiny(folder, **settings), tmp_path / "whole", accelerator="cpu", quiet=True)

    class Killed(Exception):
        pass

    made = tiny(folder, **settings)
    inner, calls = made.loss, []

    def loss(model, batch, step):
        calls.append(step)
        if step == 5:
            raise Killed
        return inner(model, batch, step)

    made.loss = loss
    with pytest.raises(Killed):
        fit(made, tmp_path / "cut", accelerator="cpu", quiet=True)
    fit(tiny(folder, **settings), tmp_path / "cut", accelerator="cpu", quiet=True)
    whole, cut = (load(tmp_path / part, checkpoint="last").model.state_dict() for part in ("whole", "cut"))
    assert calls[-1] == 5 and all(torch.equal(x, cut[name]) for name, x in whole.items())


def test_files_of_cameras_and_scanners_are_read_as_they_look(tmp_path):
    levels = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(levels).save(tmp_path / "deep.png")  # 16 bits
    for gray in (True, False):
        assert (read_image(tmp_path / "deep.png", 8, gray) == levels >> 8).all()
    held = Image.Exif()
    held[0x0112] = 6  # the camera was turned: what was stored is upright after a quarter turn clockwise
    stored = (levels >> 8).astype(np.uint8)
    Image.fromarray(stored).save(tmp_path / "turned.png", exif=held)
    assert (read_image(tmp_path / "turned.png", 8, True)[0] == np.rot90(stored, -1)).all()


def test_an_image_of_billions_of_pixels_is_refused(tmp_path):
    data = io.BytesIO()
    Image.new("L", (8, 8)).save(data, "BMP")
    head = bytearray(data.getvalue())
    head[18:26] = (60_000).to_bytes(4, "little") * 2
    (tmp_path / "vast.bmp").write_bytes(head)
    with pytest.raises(DataError, match=r"vast\.bmp is too large: Image size \(3600000000 pixels\)"):
        read_image(tmp_path / "vast.bmp", 32, False)


def test_a_share_of_the_images_is_a_part_of_a_larger_share(folder):
    counts = {share: len(tiny(folder, fraction=share).splits["train"]) for share in (0.01, 0.5, 1.0)}
    assert counts[0.01] == 10 and counts[0.01] < counts[0.5] < counts[1.0] == 54
    part = LabelledImages(np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1), np.repeat([0, 1], 20).astype(np.uint8))
    few, more = (set(some_images(part, share).images.flatten().tolist()) for share in (0.1, 0.4))
    assert few < more and len(few) == 4 and len(more) == 16


def test_floors_are_one_label_and_the_nearest_mean(folder):
    images = np.array([0, 2, 100, 104, 3], np.uint8).reshape(5, 1, 1, 1)
    train = LabelledImages(images, np.array([0, 0, 1, 1, 1], np.uint8))  # means 1 and 69
    test = LabelledImages(np.array([0, 34, 36, 90], np.uint8).reshape(4, 1, 1, 1), np.array([0, 0, 1, 0], np.uint8))
    assert image_floors(train, test) == {"one label for all": 25.0, "the nearest mean image": 75.0}
    said = tiny(folder).describe_data()
    assert said[0] == "images: 54 train, 6 val, 20 test" and "the nearest mean image" in said[1] and "JPEG" in said[2]


def test_no_image_is_in_two_splits():
    images = np.arange(30, dtype=np.uint8).reshape(30, 1, 1, 1)
    train = LabelledImages(np.concatenate([images, images[:10]]), np.zeros(40, np.uint8))
    parts = split_images(train, LabelledImages(images[:5], np.zeros(5, np.uint8)))
    found = [set(part.images.flatten().tolist()) for part in parts]
    assert (
        len(parts.train.labels) == 21
        and len(parts.val.labels) == 4
        and not found[0] & found[1]
        and found[0] | found[1] == set(range(5, 30))
    )


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"test/cat/0009.jpg": b"no image"}, r"cifar10_jpeg.tar.xz: test/cat/0009.jpg is not a whole image"),
        ({"train/lion/0000.jpg": b""}, "train/lion/0000.jpg is not train/CLASS/FILE"),
        ({"notes.txt": b"hello"}, "notes.txt is not train/CLASS/FILE"),
    ],
)
def test_a_bad_archive_is_refused_with_the_name_of_its_file(tmp_path, files, sentence):
    archive(tmp_path / "cifar10_jpeg.tar.xz", files=files, each=(1, 1))
    with pytest.raises(DataError, match=sentence):
        read_colour_images(tmp_path)


def test_other_bad_archives(tmp_path):
    data = io.BytesIO()
    Image.new("RGB", (16, 32)).save(data, "PNG")
    archive(tmp_path / "cifar10_jpeg.tar.xz", files={"test/cat/0009.jpg": data.getvalue()}, each=(1, 1))
    with pytest.raises(DataError, match=r"test/cat/0009\.jpg has 16 x 32 pixels, not 32 x 32"):
        read_colour_images(tmp_path)
    (tmp_path / "cifar10_jpeg.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match=r"cifar10_jpeg\.tar is not a whole tar archive: [^\n]*$"):
        read_colour_images(tmp_path)
    (tmp_path / "cifar10_jpeg.tar").unlink()
    (tmp_path / "cifar10_jpeg.tar.xz").unlink()
    with pytest.raises(DataError, match=r"cifar10_colour is CIFAR-10 in colour"):
        make_task(config("cifar10")).read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, not 0.0"),
        ({"crop": 33}, "crop must be from 0 to 32, not 33"),
        ({"colour": 1.0}, "colour must be from 0 to below 1"),
        ({"views": 3}, "views must be 1, or 2 for the image and its mirror image, not 3"),
        ({"depth": -1}, "depth must be at least 0"),
        ({"depth": 0, "pool": "token"}, "pool='token' reads a class token"),
        ({"stem": "conv(layers=6)"}, "nothing is left of an image of 32 x 32 pixels"),
        ({"stem": "cnn(pool='sum')"}, "pool cannot be 'sum'"),
        ({"stem": "cnn(kernel=2)"}, "needs an odd kernel, not 2"),
        ({"stem": "patch"}, "did you mean 'patches'"),
    ],
)
def test_wrong_settings_get_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_task(config("cifar10").replace(changes))


@pytest.mark.parametrize(
    "mixer",
    [
        "Neighbourhood(7, 2)",
        "Neighbourhood(7, 2) | Global(first=1)",
        "Local(9) & (Global(first=1) | Neighbourhood(7, 2))",
        "PerHead([Local(8), Neighbourhood(7, 2)])",
        "hybrid(pattern=Neighbourhood(7, 2))",
        ["softmax", "Neighbourhood(7, 2)"],
    ],
    ids=str,
)
def test_a_neighbourhood_of_another_grid_is_refused_with_both_numbers(mixer):
    sentence = r"Neighbourhood\(7, 2\) is for a grid of 7 columns, and this one has 8: use Neighbourhood\(8, 2\)"
    with pytest.raises(ValueError, match=sentence):
        make_task(config("cifar10").replace({**TINY, "mixer": mixer, "depth": 2})).model()
    right = str(mixer) if isinstance(mixer, str) else mixer[1]
    make_task(config("cifar10").replace({**TINY, "mixer": right.replace("7", "8")})).check_mixers()
    make_task(config("cifar10").replace({**TINY, "mixer": mixer, "depth": 0})).check_mixers()  # which has no mixer
    with pytest.raises(ValueError, match="grid of 7 columns, and this one has 16"):
        make_task(config("cifar10").replace({**TINY, "mixer": mixer, "depth": 2, "stem": "patches(side=2)"})).check_mixers()


@pytest.mark.parametrize(("task", "columns"), [("cifar10", 8), ("cifar10_gray", 8), ("go", 19)])
def test_another_grid_is_refused_before_anything_is_read(tmp_path, task, columns):
    net = ["--set", "net=hybrid"] if task == "go" else []
    refused = CliRunner().invoke(app, ["train", task, "--mixer", "Neighbourhood(7, 2)", "--data", str(tmp_path), *net])
    assert refused.exit_code == 2
    assert f"a grid of 7 columns, and this one has {columns}: use Neighbourhood({columns}, 2)" in " ".join(refused.output.split())


def test_a_class_token_is_before_the_grid():
    changes = {**TINY, "mixer": "Neighbourhood(8, 2) | Global(first=1)", "pool": "token"}
    with pytest.raises(ValueError, match=r"begins at token 0, and this one at token 1: use Neighbourhood\(8, 2, first=1\)"):
        make_task(config("cifar10").replace(changes)).model()
    right = changes | {"mixer": "Neighbourhood(8, 2, first=1) | Global(first=1)"}
    make_task(config("cifar10").replace(right)).check_mixers()
    with pytest.raises(ValueError, match=r"begins at token 1, and this one at token 0"):
        make_task(config("cifar10").replace({**TINY, "mixer": "Neighbourhood(8, 2, first=1)"})).check_mixers()


def test_settings_without_an_effect_are_refused():
    with pytest.raises(ValueError, match="max_len does nothing here: it is for texts"):
        check_used(make_task(config("cifar10")), ["max_len=4"])
    with pytest.raises(ValueError, match="mixer does nothing here: it is for layers behind the stem, and depth=0 has none"):
        check_used(make_task(config("cifar10", "cnn")), ["mixer=linear"])
    for preset in ("cnn", "hybrid", "mlp_mixer"):
        check_model(make_task(config("cifar10_gray", preset)))
