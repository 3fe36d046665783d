"""Online Normalization: each sample is normalized by statistics of earlier ones, and a control process keeps the
gradient orthogonal.

Forward, sample after sample t of a batch, with ⟨·⟩ the mean over the sample's positions and a = 1 − momentum:

    y_t = (x_t − μ_{t−1})/√(σ²_{t−1} + ε)
    σ²_t = a σ²_{t−1} + (1 − a) var(x_t) + a(1 − a)(⟨x_t⟩ − μ_{t−1})²        μ_t = a μ_{t−1} + (1 − a)⟨x_t⟩

Backward, in the same order, with the incoming gradient y' and b the `backward_decay`; u and v accumulate how far the
gradient is from having mean zero and from being orthogonal to y, as it is with exact statistics:

    w_t = y'_t − (1 − b) v_{t−1} y_t                      v_t = v_{t−1} + ⟨w_t y_t⟩
    x'_t = w_t/√(σ²_{t−1} + ε) − (1 − b) u_{t−1}          u_t = u_{t−1} + ⟨x'_t⟩

After the affine map, `compensation` prevents errors of the statistics from growing with depth: z/√(mean(z²) + ε) over
all features of a sample, or a clamp to [−c, c]. It is also applied in eval mode, which otherwise is batch norm on μ and
σ².

`recording` at the time of the forward decides whether μ and σ² are written, and at the time of the backward whether u
and v are. A forward that does not record also updates μ and σ² from sample to sample, but discards the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from memnorm.errors import OptionError, is_number
from memnorm.functional import Moments, constant_moments, count_per_channel, statistics_dtype
from memnorm.kernels import cpu
from memnorm.norms.base import RunningNorm, require_recording, store_finite

COMPENSATIONS = ("layer_scaling", "clamp", None)


class Stream(Moments):
    """Moments of a batch, and the running mean and variance after its last sample."""

    after: tuple[Tensor, Tensor]


class OnlineNorm(RunningNorm):
    """Online normalization over (N, C, …). `momentum` is the weight of one sample in the running statistics.

    Args:
        backward_decay: the decay of the control process, in [0, 1].
        compensation: "layer_scaling", "clamp", or None for neither.
        clamp: the limit c of "clamp".
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"backward_decay": 0.99, "compensation": "layer_scaling", "clamp": 5.0}
    MOMENTUM: ClassVar[Any] = 0.001
    MEMORY: ClassVar[tuple[str, ...]] = ("control_mean", "control_scale")

    backward_decay: float
    compensation: str | None
    clamp: float
    control_mean: Tensor  # u
    control_scale: Tensor  # v

    def _install(self, **options: Any) -> None:
        super()._install(**options)
        if not is_number(self.backward_decay) or not 0 <= self.backward_decay <= 1:
            raise OptionError(f"backward_decay must lie in [0, 1]; got {self.backward_decay!r}")
        if self.compensation not in COMPENSATIONS:
            raise OptionError(f"compensation must be 'layer_scaling', 'clamp' or None; got {self.compensation!r}")
        if not is_number(self.clamp) or not 0 < self.clamp < math.inf:
            raise OptionError(f"clamp must be a positive number; got {self.clamp!r}")
        for name in self.MEMORY:
            self._remember(name, self.num_features)

    @property
    def evaluates_as_batchnorm(self) -> bool:
        return self.compensation is None

    def _forward(self, input: Tensor) -> Tensor:
        z = super()._forward(input)
        if self.compensation == "clamp":
            return z.clamp(-self.clamp, self.clamp)
        if self.compensation is None:
            return z
        wide = z.to(statistics_dtype(z.dtype))
        square = wide.square().mean(list(range(1, z.dim())), keepdim=True)
        return (wide * torch.rsqrt(square + self.eps)).to(z.dtype)

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        if self.momentum is None:
            # Torch's tools, such as update_bn, set this to average statistics over separately normalized batches.
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps), constant_moments(x)
        require_recording(self)
        var_NC, mean_NC = torch.var_mean(_wide(x.detach()), _positions(x), correction=0)
        before_mean, before_var, after = self._stream(mean_NC, var_NC, state)
        y: Tensor = _Normalize.apply(x, before_mean, torch.sqrt(before_var + self.eps), self)
        spread = mean_NC.var(0, correction=0)
        batch = Stream(mean_NC.mean(0), var_NC.mean(0) + spread, count_per_channel(x))
        batch.after = after
        for parameter, operation in ((self.weight, torch.mul), (self.bias, torch.add)):
            if parameter is not None:
                y = operation(y, parameter.view(1, -1, *[1] * (x.dim() - 2)))
        return y.to(x.dtype), batch

    def _stream(self, mean_NC: Tensor, var_NC: Tensor, state: Moments) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The running mean and variance before every sample, and after the last."""
        new = float(self.momentum)  # type: ignore[arg-type]
        mean, var = state.mean.to(mean_NC.dtype), state.var.to(mean_NC.dtype)
        means, variances = [], []
        for sample_mean, sample_var in zip(mean_NC, var_NC, strict=True):
            means.append(mean)
            variances.append(var)
            apart = sample_mean - mean
            var = (1 - new) * var + new * sample_var + new * (1 - new) * apart.square()
            mean = mean + new * apart
        return torch.stack(means), torch.stack(variances), (mean, var)

    def _record(self, batch: Moments, state: Moments) -> None:
        if isinstance(batch, Stream):
            self._store(*batch.after)
        else:
            super()._record(batch, state)

    def _control(self, controls: tuple[Tensor, Tensor], means_NC: Iterable[Tensor], scale: Tensor) -> Any:
        """u and v before every sample, from its means (N, C) of y', y, y'y and y². The last values are written to the
        buffers of the forward.
        """
        gain = 1 - self.backward_decay
        mean_g, mean_y, mean_gy, mean_yy = means_NC
        u, v = (control.to(scale.dtype, copy=True) for control in controls)
        us, vs = [], []
        for t in range(scale.shape[0]):
            us.append(u)
            vs.append(v)
            u = u + (mean_g[t] - gain * v * mean_y[t]) / scale[t] - gain * u
            v = v + mean_gy[t] - gain * v * mean_yy[t]
        if self.recording:
            store_finite(controls, (u, v))
        return torch.stack(us), torch.stack(vs)


class _Normalize(torch.autograd.Function):
    """(x − mean)/scale with the statistics before each sample. Its backward is the control process."""

    @staticmethod
    def forward(ctx, x, mean_NC, scale_NC, layer):
        ctx.save_for_backward(x, mean_NC, scale_NC)
        ctx.layer, ctx.controls = layer, (layer.control_mean, layer.control_scale)
        return ((_wide(x) - _like(mean_NC, x)) / _like(scale_NC, x)).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, mean_NC, scale_NC = ctx.saved_tensors
        cpu.require_memory(x, *ctx.controls)
        layer = ctx.layer
        gain = 1 - layer.backward_decay
        y = (_wide(x) - _like(mean_NC, x)) / _like(scale_NC, x)
        g = _wide(grad)
        means_NC = [t.mean(_positions(x)) for t in (g, y, g * y, y.square())]
        u, v = layer._control(ctx.controls, means_NC, scale_NC)
        grad_x = (g - gain * _like(v, x) * y) / _like(scale_NC, x) - gain * _like(u, x)
        return grad_x.view(x.shape).to(x.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    """`x` in the dtype of the statistics, with one position if a sample is a vector."""
    x = x.to(statistics_dtype(x.dtype))
    return x if x.dim() > 2 else x.unsqueeze(2)


def _positions(x: Tensor) -> list[int]:
    return list(range(2, max(x.dim(), 3)))


def _like(vector_NC: Tensor, x: Tensor) -> Tensor:
    return vector_NC.view(*vector_NC.shape, *[1] * len(_positions(x)))


ENTRY: dict[str, Any] = {
    "name": "online",
    "title": "Online Normalization",
    "paper": "Chiley et al., Online Normalization for Training Neural Networks, NeurIPS 2019",
    "replace": OnlineNorm.replacing,
    "records": True,
    "state": "running mean and variance, two accumulated errors of the gradient",
    "double_forward": "fresher statistics",
}
