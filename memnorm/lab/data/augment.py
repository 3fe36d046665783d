"""Normalise and augment a whole batch at once, without a loop over its images.

The order is the ResNet paper's: subtract the mean, pad, crop, mirror. So padding with zeros is padding with the mean
colour, not with black.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Normalization:
    """(x − mean) / std per channel, in the units of the stored pixels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images_NCHW: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return images_NCHW.float().sub_(mean).div_(std)


@dataclass(frozen=True)
class Augmentation:
    """Per image: a crop of the original size after `padding` pixels were added on each side, and mirrored or not.

    `fill` is the value of the added pixels, after normalisation.
    """

    padding: int = 0
    mirror: bool = False
    fill: float = 0.0

    def __call__(self, images_NCHW: Tensor, seed: int) -> Tensor:
        if not (self.padding or self.mirror):
            return images_NCHW
        generator = torch.Generator().manual_seed(seed)
        count = len(images_NCHW)
        top_left = torch.randint(0, 2 * self.padding + 1, (2, count), generator=generator)
        mirrored = torch.randint(0, 2, (count,), generator=generator).bool() & self.mirror
        return crop(images_NCHW, self.padding, self.fill, top_left, mirrored)

    def __str__(self) -> str:
        parts = [f"random crop from {self.padding} pixels of padding"] if self.padding else []
        parts += ["random mirroring"] if self.mirror else []
        return " and ".join(parts) or "none"


def crop(images_NCHW: Tensor, padding: int, fill: float, top_left_2N: Tensor, mirrored_N: Tensor) -> Tensor:
    """Pad, then cut from each image the window of the old size at its own place, mirrored where asked.

    One gather: the index of each pixel's origin in the padded plane is row · width + column.
    """
    count, channels, height, width = images_NCHW.shape
    padded = nn.functional.pad(images_NCHW, (padding,) * 4, value=fill)
    columns_W = torch.arange(width)
    row_NH1 = (top_left_2N[0].unsqueeze(1) + torch.arange(height)).unsqueeze(2)
    column_NW = top_left_2N[1].unsqueeze(1) + torch.where(mirrored_N.unsqueeze(1), width - 1 - columns_W, columns_W)
    origin_NHW = row_NH1 * padded.shape[3] + column_NW.unsqueeze(1)
    origin = origin_NHW.view(count, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, origin).view_as(images_NCHW)
