"""A GAN with attention: its layer, spectral norms, losses, exact resume, the Frechet distance, and its benchmark."""

import json
import sys
from pathlib import Path

import pytest
import torch

from regard.analysis.frechet import frechet_distance
from regard.models.gan import MAP_LAYERS, ImageCritic, ImageGenerator, MapLayer
from regard.training.adversarial import AdversarialRates, Adversaries, critic_loss, generator_loss


def pair(kind="attention", **options):
    torch.manual_seed(0)
    nets = ImageGenerator(1, channels=4, latent=8, kind=kind, **options), ImageCritic(1, channels=4, kind=kind, **options)
    return Adversaries(*nets, AdversarialRates(batch=4))


def real(step):
    return torch.rand(4, 1, 32, 32, generator=torch.Generator().manual_seed(step)) * 2 - 1


@pytest.mark.parametrize("kind", ["attention", "convolution"])
def test_a_layer_adds_nothing_at_first_and_then_a_share(kind):
    torch.manual_seed(0)
    made, x = MapLayer(16, kind).eval(), torch.randn(2, 16, 4, 4)
    assert torch.equal(made(x), x)
    made.gain.data.fill_(0.5)
    far = made(x) - x
    assert far.abs().amax() > 0
    x[:, :, 0, 0] += 1
    reached = (made(x) - x - far).abs().amax((0, 1)) > 1e-6
    assert reached.all() if kind == "attention" else int(reached.sum()) == 4  # all cells, or the neighbours


def test_attention_over_a_map_is_that_over_its_cells_row_by_row():
    torch.manual_seed(0)
    made, x = MapLayer(8).double().eval(), torch.randn(1, 8, 2, 3, dtype=torch.double)
    made.gain.data.fill_(1.0)
    cells = x.flatten(2).mT
    torch.testing.assert_close((made(x) - x).flatten(2).mT, made.mix(cells))


def test_both_layers_have_about_as_many_weights():
    sizes = [sum(p.numel() for p in MapLayer(128, kind).parameters()) for kind in ("attention", "convolution")]
    assert abs(sizes[1] / sizes[0] - 1) < 0.02, sizes


@pytest.mark.parametrize("at", [16, 32])
@pytest.mark.parametrize("kind", MAP_LAYERS)
def test_images_have_their_size_and_every_weight_a_gradient(kind, at):
    made = pair(kind, at=at)
    made.update(real(0))
    made.generator.zero_grad()
    for net in (made.generator, made.critic):
        if kind != "none":
            net.layer.gain.data.fill_(0.1)
    images = made.generator(made.latent(3))
    assert images.shape == (3, 1, 32, 32) and images.abs().amax() <= 1
    generator_loss(made.critic(images)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.generator.parameters() if p.ndim > 1)


def test_the_largest_singular_value_of_every_map_is_about_one():
    made = pair()
    for step in range(30):
        made.critic(real(step))
    maps = [m for m in made.critic.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    largest = [torch.linalg.matrix_norm(m.weight.detach().flatten(1), 2).item() for m in maps]
    assert len(maps) == 17 and max(largest) < 1.2 and min(largest) > 0.9


def test_hinge_losses_by_hand():
    scores, fake = torch.tensor([2.0, 0.0]), torch.tensor([-3.0, 1.0])
    assert critic_loss(scores, fake).item() == 0.5 + 1.0 and generator_loss(fake).item() == 1.0


def test_what_goes_on_from_a_state_is_what_would_have_been(tmp_path):
    whole = pair()
    for step in range(4):
        whole.update(real(step))
    first = pair()
    for step in range(2):
        first.update(real(step))
    torch.save(first.state(), tmp_path / "state.pt")
    torch.manual_seed(5)
    again = pair()
    again.put_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(2, 4):
        again.update(real(step))
    assert again.step == 4 and torch.equal(again.samples(3), whole.samples(3))
    assert not torch.equal(again.samples(3, seed=1), again.samples(3))
    for name in ("generator", "critic"):
        one, two = (getattr(x, name).state_dict() for x in (whole, again))
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_average_follows_the_generator():
    made = pair()
    before = {name: p.clone() for name, p in made.averaged.named_parameters()}
    made.update(real(0))
    now = dict(made.generator.named_parameters())
    for name, p in made.averaged.named_parameters():
        torch.testing.assert_close(p, before[name] + 0.9 * (now[name] - before[name]))


def test_the_critic_learns_to_tell_noise_from_a_generator():
    made = pair("none")
    losses = [made.update(real(step))[0].item() for step in range(25)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="kind"):
        ImageGenerator(3, kind="atention")
    with pytest.raises(ValueError, match="16 or 32 cells a side, not 8"):
        ImageCritic(3, at=8)


def test_the_distance_is_that_of_normal_distributions():
    torch.manual_seed(0)
    x = torch.randn(4000, 3, dtype=torch.double)
    assert abs(frechet_distance(x, x)) < 1e-9
    assert frechet_distance(x, x + torch.tensor([3.0, 0, 4])) == pytest.approx(25)
    spread = x.std(0).square().sum().item()
    assert frechet_distance(x, 3 * x) == pytest.approx(4 * (spread + x.mean(0).square().sum().item()), rel=1e-6)
    turned = x @ torch.linalg.qr(torch.randn(3, 3, dtype=torch.double))[0]
    other = torch.randn(4000, 3, dtype=torch.double) * torch.tensor([1.0, 2, 3])
    assert frechet_distance(turned, other) == pytest.approx(frechet_distance(other, turned))
    assert frechet_distance(x, other) == pytest.approx(0 + 1 + 4, abs=0.3)
    with pytest.raises(ValueError, match="two vectors"):
        frechet_distance(x[:1], x)


def test_its_benchmark_goes_on_where_the_time_was_over(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import gan
    from test_detection import drawn_digits

    monkeypatch.setattr(gan, "read_digits", lambda _: drawn_digits())
    out = tmp_path / "gan.json"
    arguments = ["gan.py", "--tiny", "--seeds", "1", "--out", str(out), "--sheet", str(tmp_path / "samples")]
    arguments += ["--layers", "attention", "none"]
    monkeypatch.setattr(sys, "argv", arguments)
    now = [0.0]
    monkeypatch.setattr(gan.time, "monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    gan.main()
    whole = json.loads(out.read_text())
    out.unlink()
    monkeypatch.setattr(sys, "argv", [*arguments, "--limit", "4"])
    for _ in range(4):
        gan.main()
    assert "is kept at update" in capsys.readouterr().out
    parts = json.loads(out.read_text())
    assert [row["distance"] for row in parts["rows"]] == [row["distance"] for row in whole["rows"]] and len(parts["rows"]) == 2
    assert whole["floors"] == parts["floors"] and whole["floors"]["noise"] > whole["floors"]["test images"]
    assert (tmp_path / "samples" / "gan_attention_1.png").stat().st_size > 1000
