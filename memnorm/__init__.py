"""Batch normalization with a memory: Memorized Batch Normalization and Double-Forward for PyTorch.

model = memnorm.convert(model)                            # every batch norm gets a memory, weights and statistics kept
memnorm.double_forward(model, optimizer)                  # the training loop stays as it is
schedule = memnorm.StrengthSchedule(model, total_steps)   # then schedule.step() after optimizer.step()
deploy = memnorm.to_batchnorm(model)                      # plain torch.nn.BatchNorm again, same outputs in eval mode
"""

from memnorm.convert import convert, summary, to_batchnorm
from memnorm.diagnose import diagnose
from memnorm.double_forward import double_forward
from memnorm.errors import MemnormError, MemnormWarning
from memnorm.estimate import adapt, recalibrate
from memnorm.layers import MemorizedBatchNorm1d, MemorizedBatchNorm2d, MemorizedBatchNorm3d
from memnorm.replay import recording, rerecord
from memnorm.schedule import StrengthSchedule

__version__ = "0.1.0"

__all__ = [
    "MemnormError",
    "MemnormWarning",
    "MemorizedBatchNorm1d",
    "MemorizedBatchNorm2d",
    "MemorizedBatchNorm3d",
    "StrengthSchedule",
    "adapt",
    "convert",
    "diagnose",
    "double_forward",
    "recalibrate",
    "recording",
    "rerecord",
    "summary",
    "to_batchnorm",
]
