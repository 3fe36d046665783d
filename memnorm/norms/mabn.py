"""Moving Average Batch Normalization: one statistic forward, one backward, each averaged over iterations.

The gradient of batch norm contains batch statistics, too, and in small batches they are noisier than those of the
forward. Centred filters give channels of mean about zero, so MABN uses no mean. One statistic remains per direction:

    χ² = mean(x²)                      Ψ = mean(y·∂L/∂y)                        of one batch, per channel
    χ̄², Ψ̄                              their average over the last `window` images
    χ̂² ← (1 − a) χ̂² + a χ̄²             the moving average of the former: `running_var`

    y = x/√(χ̄² + ε)     z = γ r y + β     r = clip(√((χ̄² + ε)/(χ̂² + ε)), 1/λ, λ), a constant
    ∂L/∂x = (∂L/∂y − y Ψ̄)/√(χ̄² + ε)       ∂L/∂y = γ r ∂L/∂z

r uses χ̂² from before the batch. Where r is not clipped, z = γ x/√(χ̂² + ε) + β, as in eval mode before the batch. For
the first `warmup` iterations χ̄² and Ψ̄ are the batch's own, and for the first `correct_after` r is 1. With momentum
m the t-th update has a = m/(1 − (1 − m)^t), so that the initial 1 never counts.

The window consists of the current batch and the newest earlier batches, as many as have at most `window` images
together. Each batch is weighted by its number of images. A batch of more than `window` images is normalized by its own
statistics.

A parametrization centres the weights of the convolutions and linear layers before a norm: W − mean(W), with the mean
over the weights of each output.

`recording` at the time of the forward decides whether χ² is recorded, and at the time of the backward whether Ψ is. So
Double-Forward moves the recording of χ² only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize

from memnorm.centering import centred, feeding, groups_of, outputs_of
from memnorm.errors import OptionError, is_number
from memnorm.functional import Moments, count_per_channel, snapshot, statistics_dtype
from memnorm.kernels import cpu
from memnorm.norms.base import (
    RunningNorm,
    blend,
    check_whole,
    choose,
    count_up,
    read,
    require_recording,
    store_finite,
)


class Memory(NamedTuple):
    """The buffers that a training forward reads."""

    rows: Tensor
    images: Tensor
    moving: Tensor
    steps: Tensor


class Averaged(Moments):
    """Mean, which is taken as zero, and χ² of a batch; χ̄², and the rows and images of the window with the batch."""

    average: Tensor
    window: tuple[Tensor, Tensor]


class MovingAverageBatchNorm(RunningNorm):
    """Moving average batch norm over (N, C, …).

    Args:
        window: images in the averages χ̄² and Ψ̄, including those of the current batch.
        max_ratio: λ, the limit of the correction r.
        warmup: iterations that are normalized by their own statistics.
        correct_after: iterations before the correction r is used, at least `warmup`.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"window": 32, "max_ratio": 5.0, "warmup": 100, "correct_after": 1000}
    MOMENTUM: ClassVar[float] = 0.02
    DEBIASED: ClassVar[bool] = True
    ROWS: ClassVar[tuple[str, ...]] = ("memory_square", "memory_product")
    IMAGES: ClassVar[tuple[str, ...]] = ("memory_square_images", "memory_product_images")
    MEMORY: ClassVar[tuple[str, ...]] = (*ROWS, *IMAGES, "memory_steps")

    window: int
    max_ratio: float
    warmup: int
    correct_after: int
    memory_square: Tensor  # χ² of the batches before this one, the newest first
    memory_square_images: Tensor  # how many images each of them had; 0: none yet
    memory_product: Tensor  # Ψ of the backwards before this one
    memory_product_images: Tensor
    memory_steps: Tensor
    _positions: int  # values of a channel in one image, as in the last batch

    def _install(self, **options: Any) -> None:
        super()._install(**options)
        self.window = check_whole("window", self.window, 1)
        self.warmup, self.correct_after = (check_whole(name, options[name], 0) for name in ("warmup", "correct_after"))
        if not is_number(self.max_ratio) or self.max_ratio < 1:
            raise OptionError(f"max_ratio must be a number, at least 1; got {self.max_ratio!r}")
        if self.running_mean is not None:
            self.running_mean = torch.zeros_like(self.running_mean)  # not in place: the replaced layer keeps its mean
        for name in self.ROWS:
            self._remember(name, self.window - 1, self.num_features)  # batches of one image fill them
        for name in self.IMAGES:
            self._remember(name, self.window - 1, dtype=torch.long)
        self._remember("memory_steps", dtype=torch.long)
        self._positions = 1

    def _read(self) -> Any:
        """The buffers themselves, because what is computed from them is computed before they change."""
        memory = Memory(self.memory_square, self.memory_square_images, self.running_var, self.memory_steps)
        return Memory(*map(snapshot, memory)) if torch.compiler.is_compiling() else memory

    @staticmethod
    def _batch(x: Tensor) -> Averaged:
        cpu.require_memory(x)
        square = x.detach().to(statistics_dtype(x.dtype)).square().mean([0, *range(2, x.dim())])
        return Averaged(torch.zeros_like(square), square, count_per_channel(x))

    def _normalize(self, x: Tensor, state: Any) -> tuple[Tensor, Moments]:
        require_recording(self)
        self._positions = math.prod(x.shape[2:])
        batch = self._batch(x)
        batch.window, limit, batch.average, ratio = self._averages(batch.var, x.shape[0], state)
        y: Tensor = _Normalize.apply(x, self.weight, self.bias, batch.mean, batch.average, ratio, (limit, self))
        return y, batch

    def _averages(self, square: Tensor, images: int, state: Memory) -> tuple[Any, Any, Tensor, Tensor]:
        """The window with the batch, the largest number of images in an average, χ̄² and r. Torch's tools set
        `momentum=None` to average statistics over separately normalized batches.
        """
        steps = -1 if self.momentum is None else read(state.steps)
        limit = images + (steps >= self.warmup) * max(self.window - images, 0)
        window = with_newest(square, images, state.rows, state.images)
        average, ones = window_mean(*window, limit).to(square.dtype), torch.ones_like(square)
        corrects = steps >= max(self.warmup, self.correct_after)
        if corrects is False:
            return window, limit, average, ones
        ratio = torch.sqrt((average + self.eps) / (state.moving.to(square.dtype) + self.eps))
        return window, limit, average, choose(corrects, ratio.clamp(1 / self.max_ratio, self.max_ratio), ones)

    def _record(self, batch: Any, state: Any) -> None:
        moving = blend(self.running_var, batch.average, self._share(self.num_batches_tracked))
        rows, images = batch.window
        buffers = self.running_var, self.memory_square, self.memory_square_images
        finite = store_finite(buffers, (moving, rows[:-1], images[:-1]))
        self.num_batches_tracked.add_(finite)
        count_up(self.memory_steps, finite, max(self.warmup, self.correct_after))

    def _average_product(self, product: Tensor, images: int, limit: Any, memory: tuple[Tensor, Tensor]) -> Tensor:
        """Ψ̄ for the backward of a batch. Ψ is recorded in the buffers of the forward."""
        rows_KC, images_K = with_newest(product, images, *memory)
        if self.recording:
            store_finite(memory, (rows_KC[:-1], images_K[:-1]))
        return window_mean(rows_KC, images_K, limit).to(product.dtype)

    def training_moments(self, batch: Moments) -> Moments:
        images = int(batch.weight // self._positions)
        _, _, average, ratio = self._averages(_square(batch), images, self._read())
        return Moments(torch.zeros_like(average), (average + self.eps) / ratio.square() - self.eps, batch.weight)

    def running_from(self, moments: Moments) -> Moments:
        """The running statistics for a population of these moments: mean zero, and the second moment."""
        return Moments(torch.zeros_like(moments.mean), _square(moments), moments.weight)

    def _complete_plain_state(self, state_dict: Any, prefix: str) -> None:
        super()._complete_plain_state(state_dict, prefix)
        mean = state_dict[prefix + "running_mean"]
        if isinstance(mean, Tensor):  # else torch raises
            state_dict[prefix + "running_mean"] = torch.zeros_like(mean)


def with_newest(newest: Tensor, images: int, rows_KC: Tensor, images_K: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and their numbers of images, the newest first."""
    return torch.cat([newest[None], rows_KC]), torch.cat([images_K.new_full((1,), images), images_K])


def window_mean(rows_KC: Tensor, images_K: Tensor, limit: Any) -> Tensor:
    """The mean, by images, of the first rows that hold at most `limit` images together."""
    used_K = images_K * (images_K.cumsum(0) <= limit)
    return (used_K[:, None] * rows_KC).sum(0) / used_K.sum()


def _square(batch: Moments) -> Tensor:
    return batch.var + batch.mean.square()


class _Normalize(torch.autograd.Function):
    """The layer as one autograd node. Its backward uses Ψ̄ instead of Ψ, so it is not the derivative of the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, zeros, average, ratio, more):
        ctx.limit, ctx.layer = more
        scale = ratio if weight is None else ratio * weight.to(ratio.dtype)
        ctx.save_for_backward(x, weight, zeros, average, ratio, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.memory = ctx.layer.memory_product, ctx.layer.memory_product_images
        shift = None if bias is None else bias.to(ratio.dtype)
        return F.batch_norm(x, zeros, average, scale, shift, False, 0.0, ctx.layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, zeros, average, ratio, scale = ctx.saved_tensors
        cpu.require_memory(weight, *ctx.memory)
        layer = ctx.layer
        through, grad_scale, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, zeros, average, None, None, False, layer.eps, [True, True, True]
        )
        product = scale * grad_scale / count_per_channel(x)
        product = layer._average_product(product, x.shape[0], ctx.limit, ctx.memory)
        pull = (product / (average + layer.eps)).view(1, -1, *[1] * (x.dim() - 2))
        grad_x = torch.addcmul(through, x, pull, value=-1).to(x.dtype)
        grad_weight = None if weight is None else (ratio * grad_scale).to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


class Centred(nn.Module):
    """Parametrization of a weight: every output's own weights have mean zero."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.groups = groups_of(layer)

    def forward(self, weight: Tensor) -> Tensor:
        return centred(weight, self.groups)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def centre_weights(model: nn.Module, _options: Mapping[str, Any] | None = None) -> None:
    """Centre the weights of every convolution and linear layer that is followed by a moving average batch norm of as
    many channels, in the order of registration.

    The parameter stays the same object, under torch's name `parametrizations.weight.original`. Checkpoints of the model
    without centring load as well.
    """

    def channels_of(module: nn.Module) -> int | None:
        return module.num_features if isinstance(module, MovingAverageBatchNorm) else None

    for _, layer, _ in feeding(model, channels_of):
        _centre(layer)


def settle_weights(model: nn.Module) -> None:
    """Undo `centre_weights`: the centred weights become ordinary parameters."""
    for module in model.modules():
        if is_centred(module):
            # Torch takes the weight's property away from the class, which a deepcopy of the module shares.
            shared = type(module)
            module.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _centre(layer: Any) -> None:
    if is_centred(layer) or layer.weight.numel() == outputs_of(layer):  # one weight per output: nothing would be left
        return
    parametrize.register_parametrization(layer, "weight", Centred(layer))
    layer._register_load_state_dict_pre_hook(_accept_plain_weight)


def is_centred(layer: nn.Module) -> bool:
    if not parametrize.is_parametrized(layer, "weight"):
        return False
    return any(isinstance(one, Centred) for one in layer.parametrizations["weight"])  # type: ignore[index]


def _accept_plain_weight(state_dict: Any, prefix: str, *_args: Any) -> None:
    ours, plain = f"{prefix}parametrizations.weight.original", f"{prefix}weight"
    if plain in state_dict and not any(name.startswith(ours) for name in state_dict):
        state_dict[ours] = state_dict.pop(plain)


ENTRY: dict[str, Any] = {
    "name": "mabn",
    "title": "Moving Average Batch Normalization",
    "paper": "Yan et al., Towards Stabilizing Batch Statistics in Backward Propagation of Batch Normalization, "
    "ICLR 2020",
    "replace": MovingAverageBatchNorm.replacing,
    "records": True,
    "state": "second moments and gradient statistics of the batches in its window, a moving average of the former",
    "folds": True,
    "double_forward": "fresher statistics",
    "surgery": centre_weights,
    "settle": settle_weights,
}
