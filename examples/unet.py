"""A small U-Net: convolutions, group norms, residual blocks, and skips from the encoder to the decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["UNet"]


class Block(nn.Module):
    """Norm, activation and convolution, twice, around a skip (1x1 convolution if the width changes)."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, inputs, height, width]`` to ``[batch, outputs, height, width]``."""
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return self.skip(x) + y


class UNet(nn.Module):
    """Denoises images whose height and width are multiples of ``2 ** (levels - 1)``.

    Args:
        channels: Channels of an image.
        width: Channels at full resolution; each level down has twice as many.
        levels: Resolutions, the full one included.
        groups: Groups of each norm; must divide ``width``.
    """

    def __init__(self, channels: int = 1, width: int = 32, levels: int = 3, groups: int = 8) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(Block(fine, fine, groups) for fine, _ in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(fine, coarse, 2, stride=2) for fine, coarse in pairs)
        self.middle = Block(widths[-1], widths[-1], groups)
        self.grow = nn.ModuleList(nn.Conv2d(coarse, fine, 3, padding=1) for fine, coarse in reversed(pairs))
        self.up = nn.ModuleList(Block(2 * fine, fine, groups) for fine, _ in reversed(pairs))
        self.norm = nn.GroupNorm(groups, width)
        self.head = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noisy: Tensor, target: Tensor | None = None) -> Tensor:
        """The denoised images, or, when ``target`` is given, the mean squared error against it, a scalar."""
        x = self.stem(noisy)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x)
        for block, grow, skip in zip(self.up, self.grow, reversed(skips), strict=True):
            x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = block(torch.cat((x, skip), dim=1))
        x = self.head(F.silu(self.norm(x)))
        return x if target is None else F.mse_loss(x, target)
