"""The embedded model: its weights, the samples that ship with it, and the script that made both."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from workers import items, model
from workers.errors import InvalidItem
from workers.models.digits import WEIGHTS, Digits, Network
from workers.wire import Form

FILES = ["digits.safetensors", "digits-samples.json", "digits-labels.json"]
SAMPLES: list[list[int]] = json.loads(WEIGHTS.with_name("digits-samples.json").read_text())["inputs"]
LABELS: list[int] = json.loads(WEIGHTS.with_name("digits-labels.json").read_text())


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits(torch.device("cpu"))


def tensor(images: list[list[int]]) -> torch.Tensor:
    return torch.tensor(images, dtype=torch.float32).view(-1, 64)


def test_every_shipped_sample_is_recognised(digits: Digits) -> None:
    assert [result["digit"] for result in digits.predict(tensor(SAMPLES))] == LABELS  # 48 of 48


def test_the_samples_are_48_images_of_every_digit_and_nothing_else() -> None:
    body = json.loads(WEIGHTS.with_name("digits-samples.json").read_text())
    assert list(body) == ["inputs"]
    assert len(SAMPLES) == len(LABELS) == 48
    assert all(len(image) == 64 and all(type(x) is int and 0 <= x <= 16 for x in image) for image in SAMPLES)
    assert set(LABELS) == set(range(10))


def test_a_result_is_a_digit_and_a_score_that_json_can_hold(digits: Digits) -> None:
    (result,) = digits.predict(tensor([Digits.example]))
    assert result["digit"] == 6
    assert 0.9 < result["score"] <= 1
    assert result["score"] == round(result["score"], 3)
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("n", [0, 1, 7, 48, 256])
def test_an_image_gets_the_same_answer_in_any_company(digits: Digits, n: int) -> None:
    images = (SAMPLES * 6)[:n]
    alone = [digits.predict(tensor([image]))[0] for image in images]
    together = digits.predict(tensor(images))
    assert [r["digit"] for r in together] == [r["digit"] for r in alone]
    assert [r["score"] for r in together] == pytest.approx([r["score"] for r in alone], abs=0.0011)  # one last place


def test_predict_leaves_its_items_as_they_were(digits: Digits) -> None:
    given = tensor(SAMPLES)
    digits.predict(given)
    assert torch.equal(given, tensor(SAMPLES))


def test_loading_leaves_the_random_state_of_the_process_alone() -> None:
    before = torch.get_rng_state()
    Digits("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_contract_takes_it_by_its_short_name() -> None:
    loaded = model.load("digits", torch.device("cpu"))
    assert loaded.name == "Digits"
    assert loaded.max_batch_size == 64
    assert loaded.inputs == model.TensorSpec("float32", (64,), minimum=0, maximum=16)
    assert loaded.example == SAMPLES[0]


@pytest.mark.parametrize("pixel", [-1, 16.5, 255])
def test_an_image_with_a_pixel_outside_0_to_16_is_refused_and_its_neighbours_are_not(pixel: float) -> None:
    wrong = [*SAMPLES[1][:-1], pixel]
    raws = [json.dumps(image).encode() for image in (SAMPLES[0], wrong, SAMPLES[2])]
    decoded = items.decode(b",".join(raws), [len(raw) for raw in raws], Form("json", "json"), Digits.inputs)
    assert decoded.index == [0, 2]
    assert isinstance(decoded.failures[1], InvalidItem)


def test_the_weights_are_small_float32_and_exactly_those_of_the_network() -> None:
    assert WEIGHTS.stat().st_size < 200_000
    with safe_open(WEIGHTS, framework="pt") as weights:
        stored = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (not a dict)
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in Network().state_dict().items()
    }
    assert {value.dtype for value in stored.values()} == {torch.float32}
    assert sum(value.numel() for value in stored.values()) == 30_634


@pytest.mark.long
@pytest.mark.timeout(600)
def test_training_twice_gives_the_same_bytes_and_the_shipped_samples(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    runs = [tmp_path / "first", tmp_path / "second"]
    accuracy = [train_into(out) for out in runs]

    assert digests(runs[0]) == digests(runs[1])
    assert accuracy[0] == accuracy[1] >= 98  # per cent of the tenth held out; the shipped weights have 99.44
    for name in FILES[1:]:  # the weights' last bits depend on the processor, the images do not
        assert (runs[0] / name).read_bytes() == WEIGHTS.with_name(name).read_bytes()


@pytest.mark.long
def test_no_sample_was_trained_on() -> None:
    pytest.importorskip("sklearn")
    from workers.models.train_digits import split

    images, _labels, held_out, _held_out_labels = split()
    trained_on = {tuple(image) for image in images.int().tolist()}
    assert len(images) == 1617
    assert len(held_out) == 180
    assert not trained_on & {tuple(image) for image in SAMPLES}


def train_into(out: Path) -> float:
    """Held-out accuracy in per cent."""
    out.mkdir()
    command = [sys.executable, "-m", "workers.models.train_digits", "--out", str(out)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    found = re.search(r"\(([\d.]+)%\)", said)
    assert found is not None, said
    return float(found[1])


def digests(out: Path) -> list[str]:
    return [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES]
