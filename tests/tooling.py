"""Networks for the tests beside torch's own tools."""

from __future__ import annotations

import torch

import memnorm

Layer = memnorm.MemorizedBatchNorm2d


double = torch.float64
