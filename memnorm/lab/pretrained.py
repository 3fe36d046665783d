"""Pretrained weights: a file with a state dict of the network, from which a run starts.

The file is known by the hash of its bytes, which is part of the specification, so that another file is another run. It
may hold tensors only. Every name and shape must fit, except for a head with another number of classes: it stays fresh.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memnorm.lab.errors import UsageError, first_line
from memnorm.lab.spec import RunSpec

MOST_NAMES = 5


def sha256(path: str) -> str:
    """The hash of a file for `RunSpec.pretrained_sha256`."""
    return hashlib.sha256(_bytes(path)).hexdigest()


def load(model: nn.Module, spec: RunSpec, classes: int) -> str:
    """Load the pretrained weights of a run into its network. Return what was left fresh, in words; empty if nothing."""
    if spec.pretrained is None:
        return ""
    path, own = spec.pretrained, model.state_dict()
    given = _state(path, spec.pretrained_sha256)
    head = [name for name in given if name in own and _is_other_head(given[name], own[name], classes)]
    wrong = [
        *(f"{name} is missing" for name in own if name not in given),
        *(f"{name} is not in the network" for name in given if name not in own),
        *(
            f"{name} has the shape {tuple(value.shape)}, the network needs {tuple(own[name].shape)}"
            for name, value in given.items()
            if name in own and name not in head and value.shape != own[name].shape
        ),
    ]
    if len({name.rpartition(".")[0] for name in head}) > 1:
        wrong.append(f"several layers have another number of outputs: {', '.join(head[:MOST_NAMES])}")
    if wrong:
        more = f" and {len(wrong) - MOST_NAMES} more" if len(wrong) > MOST_NAMES else ""
        raise UsageError(
            f"the pretrained weights {path} do not fit {spec.model}: {'; '.join(wrong[:MOST_NAMES])}{more}. The file "
            "needs the state dict of this network before its norms are replaced."
        )
    try:
        model.load_state_dict({name: own[name] if name in head else value for name, value in given.items()})
    except Exception as error:  # for example sparse tensors
        raise UsageError(f"the pretrained weights {path} cannot be copied: {first_line(error)}") from error
    if not head:
        return ""
    return (
        f"the pretrained head is for {len(given[head[0]]):,} classes and the data have {classes:,}: "
        f"{' and '.join(head)} start fresh"
    )


def _is_other_head(given: Tensor, own: Tensor, classes: int) -> bool:
    """Return True if the tensors differ only in the number of classes."""
    same_rest = given.dim() == own.dim() > 0 and given.shape[1:] == own.shape[1:]
    return same_rest and len(own) == classes != len(given)


def _state(path: str, expected: str | None) -> dict[str, Tensor]:
    content = _bytes(path)
    if hashlib.sha256(content).hexdigest() != expected:
        raise UsageError(f"the pretrained weights {path} have changed since the run was specified: their hash differs")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles, which are refused
            state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors and was not opened; save pretrained weights with "
            "torch.save(model.state_dict(), path)"
        ) from error
    except Exception as error:  # torch.load raises anything on damaged input
        raise UsageError(f"{path} cannot be read as pretrained weights: {first_line(error)}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise UsageError(
            f"{path} must hold a state dict, tensors by name; got {type(state).__name__}. Save it with "
            "torch.save(model.state_dict(), path)."
        )
    return state


def _bytes(path: str) -> bytes:
    if not os.path.isfile(path):
        raise UsageError(f"there is no file of pretrained weights {path}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the pretrained weights {path} cannot be read: {error}") from error
