"""The loss of recognisers against PyTorch's, their decoders by settings, and answers by CTC, attention and both."""

import pytest
import torch
from torch.nn import functional as F

from regard.config import Config
from regard.data.batch import END, Batch
from regard.models.recogniser import READERS, CtcSlotLogs, recogniser, speech_encoder
from regard.training.speech_loss import ctc_loss, speech_loss

SMALL = {"width": 16, "heads": 2, "depth": 1, "ffn": 24, "dropout": 0.0, "positions": "relative", "max_len": 64}


def test_ctc_with_padded_slots_is_that_of_pytorch():
    torch.manual_seed(0)
    scores = torch.randn(3, 12, 7, dtype=torch.float64, requires_grad=True)
    target, length = torch.tensor([[2, 2, 3, 0], [4, 5, 6, 5], [1, 1, 1, 1]]), torch.tensor([3, 4, 4])
    valid = torch.arange(12) < torch.tensor([12, 9, 5])[:, None]
    loss = ctc_loss(CtcSlotLogs(scores.log_softmax(-1), valid, None), target, length)
    assert loss.parts["unsayable"] == 1 and loss.over == 7  # 1 1 1 1 needs seven slots
    (own,) = torch.autograd.grad(loss.total, scores)
    logs = scores.log_softmax(-1).transpose(0, 1)
    expected = F.ctc_loss(logs, target, valid.sum(1), length, reduction="none", zero_infinity=True).sum()
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(own, torch.autograd.grad(expected, scores)[0])


@pytest.mark.parametrize("reader", [None, *READERS])
def test_every_reader_learns_and_padding_is_as_if_absent(reader):
    torch.manual_seed(0)
    config = Config(**SMALL)
    model = recogniser(config, speech_encoder(config, 5, halvings=1, kernel=3), 9, reader=reader).double()
    for part in model.modules():
        if hasattr(part, "noise"):
            part.noise = 0.0
    x = torch.randn(1, 20, 5, dtype=torch.float64)
    alone = Batch(x, None, torch.tensor([[5, 6, END]]))
    wide = Batch(F.pad(x, (0, 0, 0, 6), value=torch.nan), torch.arange(26)[None] < 20, F.pad(alone.target, (0, 2)))
    wide = wide._replace(target_valid=torch.arange(5)[None] < 3)
    one, two = speech_loss(model, alone, ctc_weight=0.3), speech_loss(model, wide, ctc_weight=0.3)
    torch.testing.assert_close(one.total, two.total)
    assert one.over == two.over == 3
    one.total.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "ctc" in name or "decoder" in name)


def test_a_transformer_takes_the_place_of_the_conformer_and_wrong_names_are_refused():
    config = Config(**SMALL)
    assert len(speech_encoder(config, 5, block="transformer").stack.blocks) == 1
    with pytest.raises(ValueError, match="no block is called"):
        speech_encoder(config, 5, block="conformr")
    with pytest.raises(ValueError, match="norms in front"):
        speech_encoder(Config(**SMALL, norm="post"), 5)
    with pytest.raises(ValueError, match="no reader is called"):
        recogniser(config, speech_encoder(config, 5), 9, reader="locaton")
    with pytest.raises(ValueError, match="in no block"):
        recogniser(Config(**SMALL, cross="linear"), speech_encoder(config, 5), 9, reader="location")
