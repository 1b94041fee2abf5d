"""A pointer network: its answers are places of its input, the same step by step, never padding, and it learns to sort."""

import pytest
import torch

from conftest import DEVICE, close
from regard.config import Config
from regard.decoding import Constraints, generate
from regard.models.pointer import Pointer, pointer
from regard.training.losses import cross_entropy


def numbers(b, n):
    x = torch.rand(b, n, 1, device=DEVICE)
    return x, torch.cat([x[..., 0].argsort(1) + 1, torch.zeros(b, 1, dtype=torch.long, device=DEVICE)], 1)


def before(target):
    return torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)


def test_a_pointer_learns_to_sort_numbers():
    torch.manual_seed(0)
    model = pointer(Config(width=48, heads=4, depth=2, decoder_depth=1, ffn=96, dropout=0.0), 1).to(DEVICE)
    steps = 200
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(steps):
        x, target = numbers(64, 5)
        loss = cross_entropy(model(x, None, before(target)), target).mean
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    x, target = numbers(500, 5)
    begin = torch.zeros(500, 1, dtype=torch.long, device=DEVICE)
    said = generate(
        model, model.start(x), begin, constraints=Constraints(eos=Pointer.END, max_new_tokens=7, no_repeat_ngram_size=1)
    )
    right = [a == b for a, b in zip(said, target[:, :-1].tolist(), strict=True)]
    assert sum(right) / len(right) > 0.95


def test_a_pointer_says_step_by_step_what_it_says_at_once_and_never_points_at_padding():
    torch.manual_seed(0)
    model = pointer(Config(width=16, heads=2, depth=1, ffn=16, dropout=0.0), 2).to(DEVICE, torch.float64).eval()
    x = torch.randn(2, 5, 2, dtype=torch.float64, device=DEVICE)
    valid = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool, device=DEVICE)
    chosen = torch.tensor([[0, 3, 1], [0, 5, 2]], device=DEVICE)
    whole, state = model(x, valid, chosen), model.start(x, valid)
    assert whole.shape == (2, 3, 6)
    assert torch.equal(whole == -torch.inf, torch.nn.functional.pad(~valid, (1, 0))[:, None].expand(-1, 3, -1))
    for t in range(3):
        scores, state = model.extend(state, chosen[:, t : t + 1])
        close(scores[:, 0], whole[:, t])
    alone = model(x[:1, valid[0]], None, torch.tensor([[0, 2, 1]], device=DEVICE))  # without padding tokens 0, 2, 3 are 0, 1, 2
    close(whole[:1, :, [0, 1, 3, 4]], alone)


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "rotary", "alibi"])
def test_a_source_is_a_set_whatever_positions_tell_the_decoder_its_step(positions):
    torch.manual_seed(0)
    model = (
        pointer(Config(width=16, heads=2, depth=1, ffn=16, dropout=0.0, positions=positions), 2).to(DEVICE, torch.float64).eval()
    )
    x, order = torch.randn(1, 5, 2, dtype=torch.float64, device=DEVICE), torch.tensor([3, 1, 4, 0, 2], device=DEVICE)
    there = torch.cat([torch.zeros_like(order[:1]), order + 1])  # slot 0 is the end
    other = model(x[:, order], None, torch.tensor([[0, 2, 1]], device=DEVICE))
    close(model(x, None, torch.tensor([[0, 2, 4]], device=DEVICE))[..., there], other)  # tokens 1 and 3 are at 1 and 0 now


def test_a_pointer_reads_the_last_layer_and_refuses_another_wiring():
    with pytest.raises(ValueError, match="wiring"):
        pointer(Config(width=16, heads=2, depth=2, ffn=16, wiring="each"), 2)
