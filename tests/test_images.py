"""Images: convolutions, grids of tokens and their positions, stems."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Neighbourhood, layer
from regard.analysis.image_response import filter_maps, first_convolution, image_response, moved_image
from regard.blocks import ConvBlock, conv_stages, conv_stem
from regard.mixers.base import Dims, Places
from regard.models import ConvTokens, ImageReader, Patches, PerSequence
from regard.plots.image_plot import draw_filters, draw_response
from regard.positions import POSITIONS, positions
from regard.positions.grid_positions import GRID_POSITIONS, on_grid

ROWS, COLUMNS = 4, 5


def dense_neighbours(reach, across):
    """Which cells of the grid are near, by loops over rows and columns."""
    cells = [(r, c) for r in range(ROWS) for c in range(COLUMNS)]
    return torch.tensor([[abs(r - s) <= reach and abs(c - d) <= across for s, d in cells] for r, c in cells])


@pytest.mark.parametrize(("reach", "across"), [(0, 0), (1, 1), (2, 0), (0, 3), (9, 9)])
def test_a_neighbourhood_is_what_two_loops_find(reach, across):
    i = torch.arange(ROWS * COLUMNS)
    assert torch.equal(Neighbourhood(COLUMNS, reach, across)(0, i[:, None], i), dense_neighbours(reach, across))


def test_attention_in_a_neighbourhood_is_a_masked_softmax():
    torch.manual_seed(0)
    made = layer("Neighbourhood(5, 1, first=1) | Global(first=1)", width=8, heads=2).double()
    full = layer("softmax", width=8, heads=2).double()
    full.load_state_dict(made.state_dict())
    x = torch.randn(2, 1 + ROWS * COLUMNS, 8, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    seen[1:, 1:] = dense_neighbours(1, 1)
    q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (full.q, full.k, full.v))
    expected = full.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))
    found = made(x)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads)


def cell_scores(name, **options):
    """The weights of each query over all cells, of one layer of queries and keys that are all alike."""
    torch.manual_seed(0)
    text = f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"
    made = layer("softmax", width=8, heads=1, max_len=ROWS * COLUMNS, positions=text).double()
    x = torch.ones(1, ROWS * COLUMNS, 8, dtype=torch.float64)
    return made.weights(x)[0, 0].detach().log().unflatten(0, (ROWS, COLUMNS)).unflatten(-1, (ROWS, COLUMNS))


@pytest.mark.parametrize("name", ["rotary_2d", "relative_2d"])
def test_scores_depend_on_rows_and_columns_between_cells(name):
    """s(a, b) - s(a, c) is the same wherever the three cells lie: softmax takes one number off every row."""
    s = cell_scores(name, columns=COLUMNS)
    one = s[1, 1, 0, 3] - s[1, 1, 1, 1]  # a row above and two columns to the right, against itself
    for row, column in ((1, 2), (2, 0), (3, 1)):
        torch.testing.assert_close(s[row, column, row - 1, column + 2] - s[row, column, row, column], one)
    line = s[1, 3, 2, 0] - s[1, 3, 1, 3]  # as many tokens ahead as (1, 0) -> (1, 2), but another offset on the grid
    assert not torch.allclose(line, s[1, 0, 1, 2] - s[1, 0, 1, 0])


def test_relative_numbers_are_looked_up_by_row_and_column():
    torch.manual_seed(0)
    made = positions("relative_2d(columns=5, clip=1, first=1)", Dims(8, 2, max_len=11))
    bias = made.term(torch.zeros(1, 2, 11, 4), 1.0, torch.arange(11)[None])
    apart = torch.arange(11)[:, None] - torch.arange(11)
    found = bias.add(torch.zeros(1, 2, 11, 11), apart[None, None])[0]
    for i, j in ((0, 3), (4, 0), (0, 0)):
        assert (found[:, i, j] == 0).all()
    for i, j in ((1, 1), (3, 9), (10, 1), (6, 2)):
        down, right = ((a - b) for a, b in zip(divmod(i - 1, 5), divmod(j - 1, 5), strict=True))
        number = (max(-1, min(1, down)) + 1) * 3 + max(-1, min(1, right)) + 1
        assert torch.equal(found[:, i, j], made.numbers[:, number])


@pytest.mark.parametrize("name", ["sinusoidal_2d", "learned_2d"])
def test_added_vectors_have_a_part_for_the_row_and_a_part_for_the_column(name):
    made = positions(on_grid(name, COLUMNS, 1), Dims(8, 2, max_len=1 + ROWS * COLUMNS)).double()
    x = torch.zeros(1, 1 + ROWS * COLUMNS, 8, dtype=torch.float64)
    found = made.add(x, Places.of(x))[0].detach()
    assert (found[0] == 0).all()
    cells = found[1:].unflatten(0, (ROWS, COLUMNS))
    torch.testing.assert_close(cells[2, 3] - cells[2, 1], cells[0, 3] - cells[0, 1])
    torch.testing.assert_close(cells[2, 3] - cells[1, 3], cells[2, 0] - cells[1, 0])
    assert len(found.unique(dim=0)) == len(found)


def test_positions_on_a_grid_are_completed():
    assert on_grid("rotary_2d(base=50)", 8) == "rotary_2d(columns=8, first=0, base=50)"
    assert on_grid("relative_2d(columns=3)", 8, 1) == "relative_2d(columns=3, first=1)"
    assert on_grid("rotary", 8) == "rotary" and set(GRID_POSITIONS) <= set(POSITIONS)
    for name in GRID_POSITIONS:
        with pytest.raises(ValueError, match=f"{name} needs the columns of its grid"):
            positions(name, Dims(8, 2))
    with pytest.raises(ValueError, match="6 per head is no multiple of 4"):
        positions("rotary_2d(columns=2)", Dims(12, 2))
    with pytest.raises(ValueError, match="6 tokens, but relative_2d was built for 5"):
        layer("softmax", width=8, heads=2, max_len=5, positions="relative_2d").core.positions.term(
            torch.zeros(1, 2, 6, 4), 1.0, torch.arange(6)[None]
        )


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"pool": "max"}, {"kernel": 5, "layers": 3, "pool": "mean"}])
def test_a_block_is_its_convolutions_one_after_the_other(options, residual):
    torch.manual_seed(0)
    block = ConvBlock(3, 4, residual=residual, norm="none", **options).double()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    kernel, stride = options.get("kernel", 3), options.get("stride", 1)
    y = F.conv2d(x, block.convs[0].weight, block.convs[0].bias, stride, kernel // 2)
    for conv in block.convs[1:]:
        y = F.conv2d(y.relu(), conv.weight, conv.bias, 1, kernel // 2)
    if residual:
        y = y + F.conv2d(x, block.shortcut.weight, block.shortcut.bias, stride)
    pools = {"max": F.max_pool2d, "mean": F.avg_pool2d}
    y = pools[options["pool"]](y.relu(), 2) if "pool" in options else y.relu()
    torch.testing.assert_close(block(x), y)
    assert (block.size(9), block.size(8)) == tuple(y.shape[2:])


def test_a_block_without_padding_and_residual_shrinks():
    block = ConvBlock(1, 2, kernel=4, padding=0, layers=1, residual=False, norm="group")
    assert block(torch.zeros(1, 1, 8, 8)).shape == (1, 2, 5, 5) and block.size(8) == 5 and block.size(2) == 0
    with pytest.raises(ValueError, match="kernel 3 needs to be odd with padding 1, not 0"):
        ConvBlock(1, 1, padding=0)
    with pytest.raises(ValueError, match="pool cannot be 'sum'"):
        ConvBlock(1, 1, pool="sum")


@pytest.mark.parametrize(
    ("options", "side"), [({}, 4), ({"pool": "max"}, 4), ({"shrink": False}, 16), ({"stages": 1, "kernel": 5}, 16)]
)
def test_stages_halve_the_image_by_stride_or_by_pooling_or_not(options, side):
    net = conv_stages(3, first=4, blocks=1, **options)
    x = torch.randn(2, 3, 16, 16)
    assert net(x).shape == (2, net.channels, side, side) and net.size(16) == side
    assert any(isinstance(part, nn.MaxPool2d) for part in net.modules()) == ("pool" in options)


def test_a_stem_gives_tokens_and_a_cnn_answers():
    embed = ConvTokens(3, conv_stem(3, 8), 8, positions=positions("learned_2d", Dims(8, 2, max_len=17)), front=1)
    assert embed(torch.zeros(2, 3, 16, 16)).shape == (2, 17, 8) and embed.grid(16, 12) == (4, 3)
    cnn = ImageReader(ConvTokens(1, conv_stages(1, first=4, stages=2, blocks=1), 6), PerSequence(6, 10, pool="mean"))
    assert cnn(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match="nothing is left of an image of 2 x 2 pixels"):
        embed(torch.zeros(1, 3, 2, 2))
    with pytest.raises(ValueError, match=r"an image has numbers of shape \(batch, 3, height, width\), not"):
        embed(torch.zeros(1, 1, 8, 8))


def test_patches_are_of_any_size():
    wide = Patches(3, (2, 4), 8)
    assert wide(torch.zeros(1, 3, 6, 8)).shape == (1, 6, 8)
    with pytest.raises(ValueError, match="divisible by 2 and 4, not"):
        wide(torch.zeros(1, 3, 6, 9))
    filled, x = Patches(1, 5, 8, fill=True).double(), torch.randn(1, 1, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(filled(x), filled(F.pad(x, (0, 2, 0, 3))))
    assert filled(x).shape == (1, 4, 8)


def test_an_image_is_moved_by_whole_pixels_quarter_turns_and_scales():
    image = torch.zeros(1, 8, 8, dtype=torch.float64)
    image[0, 2:5, 3] = 1
    for right in (-2, 1):
        torch.testing.assert_close(moved_image(image, right=right), image.roll(right, 2))
    torch.testing.assert_close(moved_image(image, degrees=90), image.rot90(1, (1, 2)))  # counter-clockwise, as torch's
    torch.testing.assert_close(moved_image(image), image)
    square = torch.zeros(1, 8, 8, dtype=torch.float64)
    square[0, 3:5, 3:5] = 1
    assert float(moved_image(square, scale=2.0).sum()) > 3 * float(square.sum())


def test_answers_to_changed_images_are_drawn(tmp_path):
    torch.manual_seed(0)
    cnn = ImageReader(ConvTokens(3, conv_stages(3, first=4, stages=2, blocks=1), 6), PerSequence(6, 10, pool="mean")).eval()
    image = torch.rand(3, 8, 8)
    rows = image_response(cnn, image, 4, shifts=(-1, 0, 1), scales=(0.5, 1), degrees=(0, 90))
    own = cnn(image[None]).softmax(-1)[0, 4]
    torch.testing.assert_close(
        torch.stack([rows[0].probabilities[1], rows[1].probabilities[1], rows[2].probabilities[0]]), own.expand(3)
    )
    figure = draw_response(rows, "cat")
    assert sum(len(axes.get_images()) for axes in figure.axes) == 7 and sum(len(axes.patches) for axes in figure.axes) == 7
    conv = first_convolution(cnn)
    found = filter_maps(conv, image)
    torch.testing.assert_close(found.maps, F.conv2d(image[None], conv.weight, conv.bias, padding=1)[0])
    figure = draw_filters(found, image, most=3)
    assert len(figure.axes) == 7
    figure.savefig(tmp_path / "filters.png")
    with pytest.raises(ValueError, match=r"an image has shape \(3, height, width\), not \(1, 8, 8\)"):
        filter_maps(conv, image[:1])
    with pytest.raises(ValueError, match="Linear has no convolution"):
        first_convolution(nn.Linear(1, 1))
