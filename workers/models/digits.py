"""The embedded default model: a handwritten digit, 8 x 8 grey values, to the digit and how sure that is; it knows no
group, no JSON and nothing of how it was trained (that is `train_digits`)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, TypedDict

import torch
from safetensors.torch import load_file
from torch import nn

from workers.model import TensorSpec

WEIGHTS = Path(__file__).with_name("digits.safetensors")
SIDE = 8  # pixels
WHITEST = 16.0  # a pixel counts the inked dots in a block of 4 x 4


class Result(TypedDict):
    digit: int
    score: float  # the softmax of the digit, 0..1, to three places


class Network(nn.Module):
    """Three convolutions and a linear layer, 30,634 parameters. Strides, because pooling costs a CPU more."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Conv2d(1, 32, 3, padding=1)
        self.halved = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.quartered = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.digit = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32 [n, 64] of 0..16 to logits [n, 10]."""
        x = images.view(len(images), 1, SIDE, SIDE) / WHITEST
        x = self.whole(x).relu()
        x = self.halved(x).relu()
        x = self.quartered(x).relu()
        logits: torch.Tensor = self.digit(self.dropout(x.flatten(1)))
        return logits


class Digits:
    """64 numbers 0..16, row by row, to `{"digit": 7, "score": 0.998}`."""

    inputs = TensorSpec("float32", (SIDE * SIDE,), minimum=0, maximum=WHITEST)
    max_batch_size = 64
    # fmt: off
    example: ClassVar[list[int]] = [  # a six
         0,  0,  0,  9, 11,  0,  0,  0,
         0,  0,  1, 16, 11,  0,  0,  0,
         0,  0,  6, 16,  1,  0,  0,  0,
         0,  0, 11, 11,  6,  7,  1,  0,
         0,  0, 13, 14, 15, 16,  8,  0,
         0,  0, 12, 13,  5,  5, 13,  0,
         0,  0,  6, 14,  8, 15, 12,  0,
         0,  0,  0, 10, 16, 12,  2,  0,
    ]
    # fmt: on

    def __init__(self, device: torch.device | str) -> None:
        with torch.device("meta"):  # no random start: it would cost time and move the process's random state
            self.network = Network()
        self.network.load_state_dict(load_file(WEIGHTS, device=str(device)), assign=True)
        self.network.eval()

    @torch.inference_mode()
    def predict(self, items: torch.Tensor) -> list[Result]:
        """float32 [n, 64] on the model's device, inside the bounds of `inputs`, to n results."""
        scores, digits = self.network(items).softmax(dim=1).max(dim=1)
        return [
            {"digit": digit, "score": round(score, 3)}
            for digit, score in zip(digits.tolist(), scores.tolist(), strict=True)
        ]
