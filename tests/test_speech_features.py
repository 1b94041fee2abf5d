"""Features of recordings, subsampling and augmentation: against their definitions, and with padding as if absent."""

import math
import struct
import wave

import pytest
import torch
from torch.nn import functional as F

from regard.config import Config
from regard.data.speech_augment import change_speed, change_tempo, resized, spec_augment
from regard.data.speech_features import (
    ENERGY_FLOOR,
    PREEMPHASIS,
    centred,
    log_mel,
    mel_filters,
    mfcc,
    raised_floor,
    slopes,
    trimmed,
    with_slopes,
)
from regard.data.text_files import DataError
from regard.data.wav_files import Recording, parse_wav, read_wav, write_wav
from regard.models.frames import Frames
from regard.models.recogniser import speech_encoder


def tone(hertz: float, seconds: float = 0.1, rate: int = 8000) -> torch.Tensor:
    return (2 * math.pi * hertz / rate * torch.arange(round(seconds * rate), dtype=torch.float64)).sin()


def test_log_mel_is_its_definition():
    """A window by a plain Fourier sum, without a fast transform."""
    torch.manual_seed(0)
    x, rate, mels = torch.randn(440, dtype=torch.float64), 8000, 10
    found = log_mel(x, rate, mels=mels)
    assert found.shape == (1 + (440 - 200) // 80, mels)
    for t, row in enumerate(found):
        part = x[80 * t : 80 * t + 200]
        part = part - part.mean()
        part = part - PREEMPHASIS * torch.cat([part[:1], part[:-1]])
        i = torch.arange(200, dtype=torch.float64)
        part = part * (0.5 - 0.5 * (2 * math.pi * i / 199).cos()) ** 0.85
        angle = 2 * math.pi / 256 * torch.arange(129, dtype=torch.float64)[:, None] * i
        power = (part * angle.cos()).sum(1) ** 2 + (part * angle.sin()).sum(1) ** 2
        energy = mel_filters(mels, 256, rate, 20.0, 4000.0) @ power
        torch.testing.assert_close(row, energy.clamp_min(ENERGY_FLOOR).log())


def test_mfcc_is_the_cosine_transform_of_log_mel():
    x = tone(500) + 0.1 * tone(1500)
    energies, found = log_mel(x, 8000, mels=20), mfcc(x, 8000, cepstra=20, mels=20)
    k, i = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    waves = (math.pi / 20 * (i + 0.5) * k).cos().double() * math.sqrt(2 / 20)
    waves[0] /= math.sqrt(2)
    torch.testing.assert_close(found @ waves, energies, rtol=1e-5, atol=1e-5)  # orthonormal: its transpose is its inverse
    with pytest.raises(ValueError, match="20 mel filters"):
        mfcc(x, 8000, cepstra=21, mels=20)


def test_a_tone_is_loudest_in_the_filter_around_it():
    for hertz in (300, 1000, 3000):
        filters = mel_filters(20, 256, 8000, 20.0, 4000.0)
        nearest = filters[:, round(hertz * 256 / 8000)].argmax()
        assert (log_mel(tone(hertz), 8000, mels=20).argmax(1) == nearest).all()


def test_windows_of_a_growing_recording_do_not_change():
    x = torch.randn(1000)
    torch.testing.assert_close(log_mel(x[:700], 8000), log_mel(x, 8000)[:7])
    assert log_mel(x[:5], 8000).shape == (1, 40)


def test_slopes_of_a_line_are_its_slope():
    x = 3.0 * torch.arange(10.0)[:, None]
    torch.testing.assert_close(slopes(x)[2:-2], torch.full((6, 1), 3.0))
    assert with_slopes(x).shape == (10, 3)
    made = centred(torch.randn(50, 4) * 7 + 3)
    torch.testing.assert_close(made.mean(0), torch.zeros(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("spread", [True, False])
def test_recordings_of_a_batch_are_centred_as_each_is_alone(spread):
    rows = [torch.randn(n, 4, dtype=torch.float64) * 7 + 3 for n in (50, 20, 1)]
    x, valid = torch.full((3, 50, 4), 9.0, dtype=torch.float64), torch.arange(50) < torch.tensor([[50], [20], [1]])
    for place, row in zip(x, rows, strict=True):
        place[: len(row)] = row
    made = centred(x, valid, spread=spread)
    for found, row in zip(made, rows, strict=True):
        expected = (row - row.mean(0)) / (row.std(0, unbiased=False).clamp_min(1e-3) if spread else 1)
        torch.testing.assert_close(found[: len(row)], expected)
        torch.testing.assert_close(centred(row, spread=spread), expected)
        assert (found[len(row) :] == 0).all()


def test_quiet_ends_are_cut_off_and_what_is_quiet_in_between_stays():
    """Levels in decibels of windows of one feature: -60 between two loud ones is speech, at the ends it is not."""
    levels = torch.tensor([-60.0, -60, -60, -60, -60, -15, 0, -60, -10, -60, -60, -60])
    x = (levels * math.log(10) / 10)[:, None]
    assert trimmed(x, 22.0, margin=0).equal(x[5:9])
    assert trimmed(x, 12.0, margin=0).equal(x[6:9]) and trimmed(x, 5.0, margin=0).equal(x[6:7])
    assert trimmed(x, 22.0).equal(x[2:]) and trimmed(x, 70.0).equal(x)
    assert trimmed(x + 5, 22.0, margin=1).equal((x + 5)[4:10])  # a louder recording is cut at the same places


def test_a_floor_is_the_sum_of_energies_and_is_relative_to_the_loudest():
    x = torch.tensor([[0.0, -3.0], [-9.0, -20.0]], dtype=torch.float64)
    noise = 10 ** (-35 / 10)
    torch.testing.assert_close(raised_floor(x, 35.0).exp(), x.exp() + noise)
    torch.testing.assert_close(raised_floor(x + 4, 35.0), raised_floor(x, 35.0) + 4)
    padded = torch.stack([torch.cat([x, torch.full((1, 2), 50.0, dtype=torch.float64)]), torch.cat([x - 7, x[:1]])])
    valid = torch.tensor([[True, True, False], [True, True, False]])
    made = raised_floor(padded, torch.tensor([[[35.0]], [[20.0]]]), valid)
    torch.testing.assert_close(made[0, :2], raised_floor(x, 35.0))
    torch.testing.assert_close(made[1, :2], raised_floor(x - 7, 20.0))


def test_speed_changes_pitch_and_length_and_tempo_only_length():
    x = tone(400, 0.5)
    fast = change_speed(x, 2.0)
    assert len(fast) == len(x) // 2
    torch.testing.assert_close(fast[100:-100], tone(800, 0.25)[100:-100], atol=0.02, rtol=0)
    torch.testing.assert_close(resized(resized(x, 2 * len(x)), len(x)), x)
    features = torch.randn(30, 5)
    assert change_tempo(features, 1.5).shape == (20, 5)
    assert change_tempo(features, 1.0).equal(features)
    with pytest.raises(ValueError, match="above 0"):
        change_speed(x, 0)


def test_masks_lie_within_real_windows_and_within_their_bounds():
    torch.manual_seed(0)
    x, valid = torch.ones(64, 40, 12), torch.arange(40) < torch.randint(10, 41, (64, 1))
    made = spec_augment(x, valid, time_masks=1, time_share=0.5, bands=0)
    hidden = (made == 0).all(-1)
    assert (hidden.sum(1) <= valid.sum(1) // 2).all() and hidden.any() and not (hidden & ~valid).any()
    assert ((hidden[:, 1:] & ~hidden[:, :-1]).sum(1) <= 1).all()  # one stretch
    bands = (spec_augment(x, time_masks=0, bands=1, band_width=4) == 0).all(1)
    assert bands.sum(1).max() == 4 and bands.any(0).all()
    assert spec_augment(x, time_masks=0, bands=0).equal(x)


@pytest.mark.parametrize("halvings, channels", [(0, 0), (1, 0), (2, 0), (1, 3), (2, 5)])
def test_subsampling_ignores_padding_wherever_it_lies(halvings, channels):
    torch.manual_seed(0)
    embed = Frames(6, 8, halvings=halvings, channels=channels).double().eval()
    rows = [torch.randn(n, 6, dtype=torch.float64) for n in (13, 8, 1)]
    x, valid = torch.full((3, 15, 6), torch.nan, dtype=torch.float64), torch.zeros(3, 15, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = torch.randperm(15)[: len(row)].sort().values
        x[i, where], valid[i, where] = row, True
    places = embed.places(x, valid)
    found = embed(x, places)
    for i, row in enumerate(rows):
        alone = embed(row[None])[0]
        count = -(-len(row) // embed.rate)
        assert len(alone) == count == places.valid[i].sum()
        torch.testing.assert_close(found[i, :count], alone)
        assert (found[i, count:] == 0).all()
    with pytest.raises(ValueError, match=r"\(batch, windows, 6\)"):
        embed(x[..., :5])


def test_channels_are_convolutions_over_time_and_features():
    """Two of them, by PyTorch on one picture; a token sees `reach` windows to either side, as without channels."""
    torch.manual_seed(0)
    embed = Frames(7, 8, halvings=2, channels=3).double().eval()
    x = torch.randn(1, 21, 7, dtype=torch.float64)
    one, two = embed.convolutions
    y = F.conv2d(x[:, None], one.weight, one.bias, stride=2, padding=1).relu()
    y = F.conv2d(y, two.weight, two.bias, stride=2, padding=1).relu()  # (1 3 6 2)
    torch.testing.assert_close(embed(x), embed.map(y.permute(0, 2, 1, 3).reshape(1, 6, 6)))
    for reach, equal in ((embed.reach, False), (embed.reach + 1, True)):
        changed = x.clone()
        changed[:, 8 + reach] += 1  # of the third token, at 8
        assert embed(changed)[0, 2].equal(embed(x)[0, 2]) is equal
    with pytest.raises(ValueError, match="halvings=0 has none"):
        Frames(7, 8, halvings=0, channels=3)


@pytest.mark.parametrize("channels", [0, 4])
def test_scaled_tokens_weigh_as_much_as_what_a_block_adds_to_them(channels):
    """By sqrt(w), padding included; without it a recording is a tenth of the residual stream that it enters."""
    torch.manual_seed(0)
    embed, scaled = (Frames(39, 144, channels=channels, scale=scale).eval() for scale in (False, True))
    scaled.load_state_dict(embed.state_dict())
    x, valid = torch.randn(4, 50, 39), torch.arange(50) < torch.tensor([50, 30, 41, 8])[:, None]
    torch.testing.assert_close(scaled(x, valid), embed(x, valid) * 12)
    change = (scaled(x) - scaled(x).mean(1, keepdim=True)).std()
    assert 0.3 < change < 3


@pytest.mark.parametrize("block", ["conformer", "transformer"])
def test_scaled_encoders_begin_with_the_recording_in_their_residual_stream(block):
    """What they give differs from token to token as the stem does: cosine of the two, over time."""
    cosines = {}
    for scale in (False, True):
        torch.manual_seed(0)
        encoder = speech_encoder(Config(width=144, heads=4, depth=4, positions="rotary"), 39, scale=scale, block=block).eval()
        x = torch.randn(2, 200, 39)
        with torch.no_grad():
            stem, out = encoder.embed(x), encoder(x).x
        stem, out = (y - y.mean(1, keepdim=True) for y in (stem, out))
        cosines[scale] = F.cosine_similarity(stem, out, dim=-1).mean()
    assert cosines[False] < 0.65 < 0.85 < cosines[True]


def test_wav_files_of_all_widths_are_read_and_others_refused(tmp_path):
    x = torch.linspace(-0.9, 0.9, 50)
    write_wav(tmp_path / "a.wav", Recording(x, 8000))
    found = read_wav(tmp_path / "a.wav")
    assert found.rate == 8000
    torch.testing.assert_close(found.samples, x, atol=1e-4, rtol=0)
    for width, values, bits in ((1, [0, 128, 255], "<B"), (3, [-(1 << 22), 0], None), (4, [1 << 30, 0], "<i")):
        raw = b"".join(v.to_bytes(3, "little", signed=True) if bits is None else struct.pack(bits, v) for v in values)
        with wave.open(str(tmp_path / "b.wav"), "wb") as file:
            file.setparams((1, width, 8000, len(values), "NONE", ""))
            file.writeframes(raw)
        expected = {1: [-1.0, 0.0, 127 / 128], 3: [-0.5, 0.0], 4: [0.5, 0.0]}[width]
        assert read_wav(tmp_path / "b.wav").samples.tolist() == pytest.approx(expected)
    whole = (tmp_path / "a.wav").read_bytes()
    long = struct.pack("<4sI4s", b"LIST", 3, b"abc") + struct.pack("<4sIHH", b"fmt ", 40, 0xFFFE, 1) + whole[24:36]
    whole_numbers, floats = (
        long + struct.pack("<HHIH", 22, 16, 4, tag) + bytes.fromhex("0000 0000 1000 8000 00aa 0038 9b71") for tag in (1, 3)
    )
    extensible = whole_numbers + whole[36:]
    extensible = struct.pack("<4sI4s", b"RIFF", 4 + len(extensible), b"WAVE") + extensible
    assert torch.equal(parse_wav(extensible, "long.wav").samples, found.samples)
    with pytest.raises(DataError, match=r"long\.wav is not a wav file of PCM samples"):
        parse_wav(extensible.replace(whole_numbers, floats), "long.wav")
    for raw, why in (
        (whole[:100], "cut off"),
        (b"RIFFnothing", "not a wav"),
        (b"", "not a wav file of PCM samples: it is cut off"),
    ):
        with pytest.raises(DataError, match=f"bad.wav.*{why}"):
            parse_wav(raw, "bad.wav")
    with pytest.raises(DataError, match="folder"):
        read_wav(tmp_path)
    with pytest.raises(DataError, match="there is no file"):
        read_wav(tmp_path / "none.wav")
