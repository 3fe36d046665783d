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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize

from memnorm.centering import centred, feeding, groups_of, outputs_of
from memnorm.errors import OptionError, is_number
from memnorm.functional import Moments, constant_moments, count_per_channel, snapshot
from memnorm.kernels import cpu
from memnorm.norms.base import RunningNorm, check_whole, count_up, require_recording


class Averaged(Moments):
    """Moments of a batch, and χ̄² including the batch."""

    average: Tensor


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

    def _read(self) -> Moments:
        """The remembered χ², their moving average, their numbers of images, and the number of iterations."""
        counts = torch.cat([self.memory_square_images, self.memory_steps[None]])
        return Moments(snapshot(self.memory_square), snapshot(self.running_var), snapshot(counts))

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        require_recording(self)
        self._positions = math.prod(x.shape[2:])
        batch = Averaged(*constant_moments(x))
        batch.average, ratio, settled = self._averages(batch, state)
        y: Tensor = _Normalize.apply(x, self.weight, self.bias, batch.average, ratio, settled, self)
        return y, batch

    def _images(self, batch: Moments) -> Any:
        return batch.weight // self._positions

    def _averages(self, batch: Moments, state: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """χ̄², r, and True if χ̄² is the average over the window. Torch's tools set `momentum=None` to average
        statistics over separately normalized batches.
        """
        square, counts = _square(batch), torch.as_tensor(state.weight)
        steps = counts[-1]
        settled = steps >= self.warmup
        if self.momentum is None:
            return square, torch.ones_like(square), torch.zeros_like(settled)
        windowed = window_mean(square, self._images(batch), state.mean, counts[:-1], self.window)
        average = torch.where(settled, windowed, square)
        ratio = torch.sqrt((average + self.eps) / (state.var.to(square.dtype) + self.eps))
        ratio = ratio.clamp(1 / self.max_ratio, self.max_ratio)
        corrects = settled & (steps >= self.correct_after)
        return average, torch.where(corrects, ratio, torch.ones_like(ratio)), settled

    def _record(self, batch: Any, state: Moments) -> None:
        square = _square(batch)
        finite = square.to(self.memory_square.dtype).isfinite().all()
        self._write(torch.zeros_like(square), batch.average)
        self._push(self.memory_square, self.memory_square_images, square, self._images(batch), finite)
        count_up(self.memory_steps, finite, max(self.warmup, self.correct_after))

    def _average_product(self, product: Tensor, images: int, settled: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Ψ̄ for the backward of a batch. Ψ is recorded in the buffers of the forward."""
        average = torch.where(settled, window_mean(product, images, rows, counts, self.window), product)
        if self.recording:
            self._push(rows, counts, product, images, product.to(rows.dtype).isfinite().all())
        return average

    @staticmethod
    def _push(rows: Tensor, counts: Tensor, newest: Tensor, images: int, valid: Tensor) -> None:
        """Put the newest row and its number of images first and drop the oldest, in place, if `valid`."""
        for buffer, value in ((rows, newest), (counts, counts.new_full((), images))):
            moved = torch.cat([value[None].to(buffer.dtype), buffer])[: buffer.shape[0]]
            buffer.copy_(torch.where(valid, moved, buffer))

    def training_moments(self, batch: Moments) -> Moments:
        average, ratio, _ = self._averages(batch, self._read())
        return Moments(torch.zeros_like(average), (average + self.eps) / ratio.square() - self.eps, batch.weight)

    def running_from(self, moments: Moments) -> Moments:
        """The running statistics for a population of these moments: mean zero, and the second moment."""
        return Moments(torch.zeros_like(moments.mean), _square(moments), moments.weight)

    def _complete_plain_state(self, state_dict: Any, prefix: str) -> None:
        super()._complete_plain_state(state_dict, prefix)
        mean = state_dict[prefix + "running_mean"]
        if isinstance(mean, Tensor):  # else torch raises
            state_dict[prefix + "running_mean"] = torch.zeros_like(mean)


def window_mean(newest: Tensor, images: int, rows_KC: Tensor, images_K: Tensor, window: int) -> Tensor:
    """The mean, by images, of `newest` and of the first rows that hold at most `window` images with it."""
    share_K = images_K * (images_K.cumsum(0) <= window - images)
    total = (share_K[:, None] * rows_KC).sum(0) + images * newest
    return (total / (share_K.sum() + images)).to(newest.dtype)


def _square(batch: Moments) -> Tensor:
    return batch.var + batch.mean.square()


class _Normalize(torch.autograd.Function):
    """The layer as one autograd node. Its backward uses Ψ̄ instead of Ψ, so it is not the derivative of the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, average, ratio, settled, layer):
        ctx.save_for_backward(x, weight, average, ratio, settled)
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        ctx.memory = layer.memory_product, layer.memory_product_images
        scale = ratio if weight is None else ratio * weight.to(ratio.dtype)
        shift = None if bias is None else bias.to(ratio.dtype)
        return F.batch_norm(x, torch.zeros_like(average), average, scale, shift, False, 0.0, layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, average, ratio, settled = ctx.saved_tensors
        cpu.require_memory(weight, *ctx.memory)
        layer = ctx.layer
        scale = ratio if weight is None else ratio * weight.to(ratio.dtype)
        through, grad_scale, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, torch.zeros_like(average), average, None, None, False, layer.eps, [True, True, True]
        )
        product = scale * grad_scale / count_per_channel(x)
        product = layer._average_product(product, x.shape[0], settled, *ctx.memory)
        pull = (product / (average + layer.eps)).view(1, -1, *[1] * (x.dim() - 2))
        grad_x = (through - x * pull).to(x.dtype)
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
