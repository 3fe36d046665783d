"""A network that kills its process once in the middle of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from helpers import lab
from torch import Tensor, nn


class KilledRank(nn.Module):
    """Kills the second process in its n-th training forward with gradient, and leaves a mark not to do it again."""

    def __init__(self, dies_at: int | None, mark: str) -> None:
        super().__init__()
        self.dies_at, self.mark, self.forwards = dies_at, Path(mark), 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        if os.environ["RANK"] == "1" and self.forwards == self.dies_at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def net(num_classes: int, in_channels: int, dies_at: int | None, mark: str) -> nn.Module:
    return nn.Sequential(KilledRank(dies_at, mark), lab.net(num_classes, in_channels, dropout=0.3))
