"""Train a small U-Net to denoise scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 4 examples/train_unet.py

The plan is printed, the model trained on all processes and then on one, and the two loss curves compared.
"""

from __future__ import annotations

import torch
from common import Task, arguments, run
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from unet import UNet

__all__ = ["batches", "images"]

BATCH, SIZE, NOISE = 16, 16, 0.5


def images() -> Tensor:
    """All digits as float32 in [-1, 1], enlarged from 8x8: ``[1797, 1, SIZE, SIZE]``."""
    digits = torch.from_numpy(load_digits().images).float()[:, None]
    return F.interpolate(digits / 8 - 1, size=(SIZE, SIZE), mode="bilinear", align_corners=False)


def batches(data: Tensor, step: int) -> dict[str, Tensor]:
    """The global batch of one step: ``BATCH`` random digits, noisy and clean; the step is the seed."""
    generator = torch.Generator().manual_seed(step)
    clean = data[torch.randint(len(data), (BATCH,), generator=generator)]
    return {"noisy": clean + NOISE * torch.randn(clean.shape, generator=generator), "target": clean}


if __name__ == "__main__":
    options = arguments("Train a small U-Net on scikit-learn's digits.", steps=60)
    digits = images()
    run(Task("U-Net", UNet, lambda step: batches(digits, step), lambda loss: loss), options)
