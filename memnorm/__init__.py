"""Batch norm for small batches, in PyTorch: a memory of recent batches, in forward and in backward.

model = memnorm.convert(model, "two_way")                 # every batch norm gets a memory
deploy = memnorm.to_batchnorm(model)                      # plain torch.nn.BatchNorm again, same outputs in eval mode

The method of the paper, Memorized Batch Normalization with Double-Forward:

model = memnorm.convert(model, "mbn")
memnorm.double_forward(model, optimizer)                  # the training loop stays as it is
schedule = memnorm.StrengthSchedule(model, total_steps)   # then schedule.step() after optimizer.step()
"""

from memnorm import distributed as distributed
from memnorm import errors as errors
from memnorm import estimate as estimate
from memnorm import functional as functional
from memnorm import layers as layers
from memnorm import norms as norms
from memnorm import reference as reference
from memnorm import replay as replay
from memnorm import schedule as schedule
from memnorm._convert import convert, summary
from memnorm._diagnose import diagnose
from memnorm._double_forward import DoubleForward, double_forward
from memnorm._monitor import monitor
from memnorm.centering import center
from memnorm.errors import MemnormError, MemnormWarning
from memnorm.estimate import adapt, recalibrate
from memnorm.layers import MemorizedBatchNorm, MemorizedBatchNorm1d, MemorizedBatchNorm2d, MemorizedBatchNorm3d
from memnorm.norms.two_way import TwoWayBatchNorm1d, TwoWayBatchNorm2d, TwoWayBatchNorm3d
from memnorm.plain import plain_state_dict, to_batchnorm
from memnorm.replay import recording, rerecord
from memnorm.schedule import StrengthSchedule

__version__ = "0.1.0"

__all__ = [
    "DoubleForward",
    "MemnormError",
    "MemnormWarning",
    "MemorizedBatchNorm",
    "MemorizedBatchNorm1d",
    "MemorizedBatchNorm2d",
    "MemorizedBatchNorm3d",
    "StrengthSchedule",
    "TwoWayBatchNorm1d",
    "TwoWayBatchNorm2d",
    "TwoWayBatchNorm3d",
    "adapt",
    "center",
    "convert",
    "diagnose",
    "double_forward",
    "monitor",
    "plain_state_dict",
    "recalibrate",
    "recording",
    "rerecord",
    "summary",
    "to_batchnorm",
]
