"""A layer's training forward on the kernels of the processor, where they can do all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memnorm.collective import Some
from memnorm.functional import BackwardMemory, with_gradient
from memnorm.kernels import cpu
from memnorm.memory import Remembering
from memnorm.recompute import inside_backward, may_be_recomputed


class OnKernels(Remembering):
    """What a memorized layer asks the kernels to do."""

    eps: float
    num_features: int
    track_running_stats: bool
    recording: bool
    ranks: tuple[int, ...]
    sync: bool | Some
    _parameters: Any

    def _forward_on_kernels(self, x: Tensor, rectify: bool, residual: Tensor | None) -> Tensor | None:
        """A training forward in one call; None if something asks for more than that."""
        if torch.compiler.is_dynamo_compiling() or not (
            self.track_running_stats and self.shift and self.sync is False and self._outgoing is None
        ):
            return None
        found = self._at_once(x, rectify, residual) or self._after_a_closer_look(x, rectify, residual)
        if found is None:
            return None
        weight, bias, backward = self._vector("weight"), self._vector("bias"), self._backward_memory()
        return with_gradient(*found, x, weight, bias, residual, rectify, self.eps, backward)

    def _at_once(self, x: Tensor, rectify: bool, residual: Tensor | None) -> tuple[Tensor, bytearray] | None:
        known, kernels, evenly = self._known_memory, cpu.module(), self.momentum is None
        if known is None or known.handle is None or kernels is None:
            return None
        found: tuple[Tensor, bytearray] | None = kernels.train_layer(
            known.handle,
            self._buffers,
            self._parameters,
            x,
            residual,
            rectify,
            self.ranks,
            torch.get_num_threads(),
            self.recording,
            self.eps,
            self._decay_per_batch,
            self.prior_weight,
            self.prior_from_init and not evenly,
            evenly,
        )
        return found

    def _after_a_closer_look(
        self, x: Tensor, rectify: bool, residual: Tensor | None
    ) -> tuple[Tensor, bytearray] | None:
        mean = self._buffers["running_mean"]
        if not (
            mean is not None
            and cpu.takes(x, mean.dtype)
            and x.dim() in self.ranks
            and x.shape[1] == self.num_features < x.numel()
            and (residual is None or (rectify and cpu.are_alike(x, residual)))
            and not inside_backward()
            and not may_be_recomputed()
        ):
            return None
        memory = self._kernels_memory()
        if memory is None:
            return None
        memory.grasp(self._buffers, self._parameters)
        weight, bias = self._vector("weight"), self._vector("bias")
        return cpu.forward(x, weight, bias, residual, rectify, self.eps, memory, self.recording)

    def _backward_memory(self) -> BackwardMemory | None:
        """What the backward of this forward remembers of earlier ones; the paper's layer remembers nothing."""
        return None

    def _vector(self, name: str) -> Tensor | None:
        """A parameter, past `nn.Module.__getattr__`; one that is computed from others comes by its name alone."""
        parameters: Any = self._parameters
        return parameters[name] if name in parameters else getattr(self, name)
