"""The attention of whole models: recorded in a pass, and drawn with the tokens it belongs to."""

import pytest
import torch

from conftest import close
from regard.blocks import Stack
from regard.config import Config
from regard.data.batch import BEGIN, UNKNOWN
from regard.data.token_labels import token_labels
from regard.data.vocabulary import Bytes, Characters, Subwords, Words
from regard.models.attention_record import record_attention
from regard.models.build import translator
from regard.plots.attention_plot import draw_attention
from regard.tasks.text_attention import LayerAttention, StackTokens, TextAttention, text_attention

SMALL = Config(width=16, heads=2, depth=2, ffn=16, dropout=0.0, max_len=32)


def test_every_mixer_of_a_pass_is_recorded_in_its_order():
    model = translator(SMALL, 20).double().eval()
    source, target = torch.randint(5, 20, (2, 7)), torch.randint(5, 20, (2, 4))
    valid = torch.arange(7) < torch.tensor([[7], [5]])
    with record_attention(model) as found:
        after = model(source, valid, target)
    names = ["encoder.stack.blocks.0.mixer", "encoder.stack.blocks.1.mixer", "decoder.blocks.0.mixer", "decoder.blocks.0.cross"]
    assert [one.name for one in found][:4] == names and len(found) == 6
    assert [tuple(one.weights.shape) for one in found[1:4]] == [(2, 2, 7, 7), (2, 2, 4, 4), (2, 2, 4, 7)]
    assert found[2].weights.triu(1).abs().max() == 0 and found[3].weights[1, :, :, 5:].abs().max() == 0
    close(found[3].weights.sum(-1), torch.ones(2, 2, 4).double())
    close(after, model(source, valid, target))  # and it changes nothing, neither then nor later
    assert len(found) == 6


def test_mixers_without_weights_are_named():
    model = Stack.of(["Local(3)", "conv"], width=16, heads=2).eval()
    with record_attention(model) as found:
        model(torch.randn(1, 5, 16))
    assert found[0].weights is not None and found[1].weights is None
    assert found[1].missing == "conv has no attention weights: it does not answer queries by sums of values"


def test_rows_of_pooled_queries_are_groups_of_tokens():
    model = Stack.of(["pooled_queries(rate=2)", "softmax"], width=16, heads=2).eval()
    x = torch.randn(1, 5, 16)
    found = text_attention(torch.nn.Sequential(model), lambda: model(x), [StackTokens(list("abcde"))], "abcde", "")
    assert [(layer.queries, layer.keys) for layer in found.layers] == [
        (["a…b", "c…d", "e"], list("abcde")),
        (["a…b", "c…d", "e"], ["a…b", "c…d", "e"]),
    ]
    assert [tuple(layer.weights.shape) for layer in found.layers] == [(2, 3, 5), (2, 3, 3)]


def test_every_vocabulary_names_its_tokens():
    assert token_labels(Words(["a", "duck"]), [BEGIN, 6, UNKNOWN]) == ["<begin>", "duck", "<unknown>"]
    assert token_labels(Characters([" ", "a"]), [6, 5]) == ["a", " "]
    assert token_labels(Bytes(), Bytes().encode("aé")) == ["a", "c3", "a9"]
    words = Subwords.of(["a duck a duck"], size=300)
    labels = token_labels(words, words.encode("a duck"))
    assert "".join(labels) == " a duck" and len(labels) < 6


def some_attention(kinds=("self", "cross"), n=4, m=6) -> TextAttention:
    layers = [
        LayerAttention(f"decoder {i}", kind, "softmax", torch.rand(2, n, m).softmax(-1), ["$x$"] * n, [" y\n"] * m)
        for i in (1, 2)
        for kind in kinds
    ]
    return TextAttention("a $ text", "an answer", layers, ["encoder 1: conv has no attention weights"])


@pytest.mark.parametrize("size", [(1, 1), (4, 6), (3, 90)])
def test_a_picture_has_a_matrix_for_every_layer_and_head(size, tmp_path):
    found = some_attention(n=size[0], m=size[1])
    figure = draw_attention(found, "runs/x: a string turned around")
    shown = [axes.images[0].get_array().shape for axes in figure.axes if axes.images]
    assert shown[:-1] == [size] * (4 + 6)  # two heads of self-attention, two and their mean of cross-attention; and a legend
    written = [text.get_text() for text in figure.texts]
    assert {"a $ text", "decoder: self-attention, softmax", "decoder: cross-attention to the source, softmax"} <= {*written}
    assert "answer: an answer\nruns/x: a string turned around" in written
    assert any(text.startswith("not shown: encoder 1: conv") for text in written)
    labels = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
    assert "y⏎" in labels
    figure.savefig(tmp_path / "a.png")


def test_nothing_to_draw_is_a_sentence():
    with pytest.raises(ValueError, match="layer 1: conv has no attention weights"):
        draw_attention(TextAttention("a", "b", [], ["layer 1: conv has no attention weights"]))
