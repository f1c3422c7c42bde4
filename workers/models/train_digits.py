"""Trains the embedded model from scikit-learn's copy of the digits: a development step that nothing at run time needs.

    python -m workers.models.train_digits [--out FOLDER]

writes digits.safetensors, digits-samples.json (a body for POST /infer) and digits-labels.json, the same bytes every
time on one kind of processor and one version of torch, and prints the accuracy on a tenth of the images, which training
never saw. The recipe was chosen by cross-validation inside the other nine tenths (99.4 % over five folds).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional

from workers.models.digits import SIDE, WEIGHTS, Network

SEED = 0
EPOCHS = 40
BATCH = 64  # images
PEAK_RATE = 4e-3
SAMPLES = 48  # images


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the digits model.")
    parser.add_argument("--out", type=Path, default=WEIGHTS.parent, help="folder for the files (default: %(default)s)")
    out: Path = parser.parse_args().out

    torch.set_num_threads(1)  # sums in one order, whatever the number of cores
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)

    images, labels, held_out_images, held_out_labels = split()
    network = train(images, labels)
    right = int((predict(network, held_out_images) == held_out_labels).sum())

    (out / WEIGHTS.name).write_bytes(save(network.state_dict()))  # save_file would make it readable by its owner alone
    write_samples(out, held_out_images[:SAMPLES], held_out_labels[:SAMPLES])
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"held out: {right} of {len(held_out_labels)} right ({right / len(held_out_labels):.2%}), {size} parameters")


def split() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images float32 [n, 64] of 0..16 and labels int64 [n]: nine tenths to train on, then the tenth held out."""
    data = load_digits()
    train_at, held_out_at = train_test_split(
        range(len(data.target)), test_size=0.1, stratify=data.target, random_state=SEED
    )
    images, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target, dtype=torch.int64)
    return images[train_at], labels[train_at], images[held_out_at], labels[held_out_at]


def train(images: torch.Tensor, labels: torch.Tensor) -> Network:
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    steps = EPOCHS * math.ceil(len(images) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(images)), BATCH):
            loss = functional.cross_entropy(network(wobbled(images[batch])), labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return network.eval()


def wobbled(images: torch.Tensor) -> torch.Tensor:
    """Each image turned by up to 10 degrees, scaled by up to a tenth, slanted and shifted by up to half a pixel."""
    n = len(images)

    def up_to(limit: float) -> torch.Tensor:
        return (2 * torch.rand(n) - 1) * limit

    half_pixel = 1 / SIDE  # the grid's coordinates run from -1 to 1
    angle, scale, slant = up_to(math.radians(10)), 1 + up_to(0.1), up_to(0.1)
    across = torch.stack([scale * angle.cos(), slant - scale * angle.sin(), up_to(half_pixel)], dim=1)
    down = torch.stack([scale * angle.sin(), scale * angle.cos(), up_to(half_pixel)], dim=1)
    size = [n, 1, SIDE, SIDE]
    grid = functional.affine_grid(torch.stack([across, down], dim=1), size, align_corners=False)
    return functional.grid_sample(images.view(size), grid, align_corners=False).view(n, -1)


@torch.inference_mode()
def predict(network: Network, images: torch.Tensor) -> torch.Tensor:
    digits: torch.Tensor = network(images).argmax(dim=1)
    return digits


def write_samples(out: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    """The pixels are whole numbers, and an image a line keeps the file readable."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in images.int().tolist())
    (out / "digits-samples.json").write_text(f'{{"inputs": [\n{rows}\n]}}\n')
    (out / "digits-labels.json").write_text(json.dumps(labels.tolist()) + "\n")


if __name__ == "__main__":
    main()
