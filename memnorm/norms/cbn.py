"""Cross-Iteration Batch Normalization: the statistics of the last k batches, corrected for the changes of the weights.

A batch of τ iterations ago had mean μ and second moment ν with weights θ' = θ(t−τ). Their values with the current
weights θ are estimated by a first-order expansion in the filters of the preceding layer, for each channel in its own
filter and bias:

    μ(θ) ≈ μ + ∂μ/∂θ·(θ − θ')          ν(θ) ≈ ν + ∂ν/∂θ·(θ − θ')
    μ̄ = mean over the k batches of μ(θ)          ν̄ = mean of max(ν(θ), μ(θ)²)          σ̄² = ν̄ − μ̄²
    y = γ (x − μ̄)/√(σ̄² + ε) + β

The gradient flows through the share of the current batch in μ̄ and σ̄²; earlier batches are constants. Running
statistics and eval mode are those of batch norm. For the first `burn_in` batches k is 1, because the expansion holds
for small changes of the weights, and the changes are largest at the start of training.

With p the input patch under the filter, x = θ·p + b, so ∂μ/∂θ = mean(p), which is the same for all channels of a group,
and with σ² in place of ν, which loses no digits where the mean is large, ∂σ²/∂θ = 2 cov(x, p) and

    ν(θ) − μ(θ)² = σ² + ∂σ²/∂θ·(θ − θ') − (μ(θ) − μ)²

Earlier batches enter as the union of equally weighted sets, which is the memory of memorized batch norm.

The preceding layer is found as the model runs: a forward hook on convolutions and linear layers attaches a `Source` to
their output, and the norm looks for it on its input. Without one, or with one from another layer than before, the batch
is normalized by its own statistics and not remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from memnorm.errors import InputError
from memnorm.functional import Moments, count_per_channel, normalize_with_memory, snapshot, statistics_dtype
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm, check_total_steps, check_whole, count_up

NOTE = "_memnorm_source"
BURN_IN = 2 / 3  # share of the training, as in the authors' configurations for COCO: 8 of 12 epochs


class Source(NamedTuple):
    """The layer that computed a tensor, its input, and the versions of input and output to detect in-place changes."""

    layer: Any
    input: Tensor
    versions: tuple[int, int]


class CrossIterationBatchNorm(RunningNorm):
    """Cross-iteration batch norm over (N, C, …), after a convolution or linear layer with the hook `note_source`.

    Args:
        window: k, the number of batches whose statistics are used, including the current one.
        burn_in: the number of batches before earlier ones are used; None: two thirds of `total_steps`, or 0 without it.
        total_steps: length of the training.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"window": 4, "burn_in": None, "total_steps": None}
    MEMORY: ClassVar[tuple[str, ...]] = (
        *("memory_mean", "memory_var", "memory_linear_mean", "memory_linear_var"),
        *("memory_slope_mean", "memory_slope_var", "memory_filled", "memory_next", "memory_steps"),
    )

    window: int
    burn_in: int
    total_steps: int | None
    memory_mean: Tensor  # moments of earlier batches with their weights
    memory_var: Tensor
    memory_linear_mean: Tensor  # slope · weights, with those weights
    memory_linear_var: Tensor
    memory_slope_mean: Tensor  # (k − 1, groups, weights of a filter)
    memory_slope_var: Tensor  # (k − 1, channels, weights of a filter)
    memory_filled: Tensor
    memory_next: Tensor  # the row to write next; when all are filled, the oldest
    memory_steps: Tensor
    _fed_by: weakref.ref[nn.Module] | None
    _feed: tuple[Source, Tensor] | None

    def _install(self, **options: Any) -> None:
        super()._install(**options)
        check_total_steps("cbn", self.total_steps)
        if self.burn_in is None:
            self.burn_in = round(BURN_IN * (self.total_steps or 0))
        self.window, self.burn_in = check_whole("window", self.window, 1), check_whole("burn_in", self.burn_in, 0)
        self._fed_by = self._feed = None
        for name in self.MEMORY[:4]:
            self._remember(name, self.window - 1, self.num_features)
        for name in ("memory_slope_mean", "memory_slope_var"):
            self._remember(name, self.window - 1, 0, 0)  # until the preceding layer is known
        for name in ("memory_filled", "memory_next", "memory_steps"):
            self._remember(name, dtype=torch.long)

    def _forward(self, input: Tensor) -> Tensor:
        source = take_source(input)
        if source is not None and self._accepts(source, input):
            self._feed = source, input.detach()
        try:
            return super()._forward(input)
        finally:
            self._feed = None

    def _accepts(self, source: Source, x: Tensor) -> bool:
        """Return True if there is a memory of batches that came through the same layer."""
        owner = self._fed_by() if self._fed_by is not None else None
        unused = not self.training or self.window == 1 or self.running_mean is None
        if unused or (owner is not None and owner is not source.layer):
            return False
        groups, weights = getattr(source.layer, "groups", 1), source.layer.weight[0].numel()
        shapes = {
            "memory_slope_mean": (self.window - 1, groups, weights),
            "memory_slope_var": (self.window - 1, x.shape[1], weights),
        }
        for name, shape in shapes.items():
            if tuple(self.get_buffer(name).shape) != shape:
                self._remember(name, *shape)
                self.memory_filled.zero_()
                self.memory_next.zero_()
        self._fed_by = weakref.ref(source.layer)
        return True

    def _read(self) -> Moments:
        """The union of the earlier batches with the current weights, and their number."""
        if self._feed is None:
            none = torch.zeros_like(self.memory_filled)
            return Moments(snapshot(self.running_mean), snapshot(self.running_var), none)
        linear_mean, linear_var = self._linear(self._feed[0].layer, self.memory_slope_mean, self.memory_slope_var)
        mean_KC = self.memory_mean + linear_mean - self.memory_linear_mean
        change_KC = linear_var - self.memory_linear_var - (mean_KC - self.memory_mean).square()
        var_KC = (self.memory_var + change_KC).clamp(min=0)
        filled = self.memory_filled * (self.memory_steps >= self.burn_in)
        used_K = torch.arange(self.window - 1, device=filled.device) < filled
        share_K1 = used_K.unsqueeze(1).to(mean_KC.dtype) / filled.clamp(min=1)
        mean_C = (share_K1 * mean_KC).sum(0)
        return Moments(mean_C, (share_K1 * (var_KC + (mean_KC - mean_C).square())).sum(0), filled)

    def _linear(self, layer: Any, slope_KGF: Tensor, slope_KCF: Tensor) -> tuple[Tensor, Tensor]:
        """The linear terms of mean and variance for the current weights and bias of `layer`."""
        dtype = self.memory_mean.dtype
        weight_CF = layer.weight.detach().flatten(1).to(dtype)
        grouped = weight_CF.unflatten(0, (slope_KGF.shape[1], -1))
        with torch.autocast(weight_CF.device.type, enabled=False):
            mean_KC = torch.einsum("kgf,gcf->kgc", slope_KGF.to(dtype), grouped).flatten(1)
            var_KC = torch.einsum("kcf,cf->kc", slope_KCF.to(dtype), weight_CF)
        return mean_KC if layer.bias is None else mean_KC + layer.bias.detach().to(dtype), var_KC

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        count = count_per_channel(x)
        if count == 1 and not bool(state.weight > 0):
            raise InputError(
                f"{type(self).__name__}: Expected more than 1 value per channel when training, got input size "
                f"{tuple(x.shape)}, and no earlier batch is remembered. Start with a larger batch."
            )
        memory = Moments(state.mean, state.var, state.weight * count)
        return normalize_with_memory(x, self.weight, self.bias, memory, self.eps)

    def _record(self, batch: Moments, state: Moments) -> None:
        super()._record(batch, state)
        finite = (batch.mean.isfinite() & batch.var.isfinite()).all()
        count_up(self.memory_steps, finite, self.burn_in)
        if self._feed is None:
            return
        source, x = self._feed
        slope_GF, slope_CF = slopes(source, x, batch)
        dtype = self.memory_mean.dtype
        linear = self._linear(source.layer, slope_GF[None], slope_CF[None])
        newest = [one.to(dtype) for one in (batch.mean, batch.var, linear[0][0], linear[1][0], slope_GF, slope_CF)]
        finite = finite & torch.stack([one.isfinite().all() for one in newest]).all()
        for name, value in zip(self.MEMORY, newest, strict=False):
            rows, at = self.get_buffer(name), self.memory_next[None]
            rows.index_copy_(0, at, torch.where(finite, value[None].to(rows.dtype), rows.index_select(0, at)))
        count_up(self.memory_filled, finite, self.window - 1)
        self.memory_next.copy_((self.memory_next + finite) % (self.window - 1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("memory_slope_mean", "memory_slope_var"):
            saved, own = state_dict.get(prefix + name), self._buffers.get(name)
            if isinstance(saved, Tensor) and own is not None and saved.shape[:1] == own.shape[:1]:
                self._remember(name, *saved.shape)  # this layer may not have run yet
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fed_by": None, "_feed": None}


def slopes(source: Source, x: Tensor, batch: Moments) -> tuple[Tensor, Tensor]:
    """∂μ/∂θ per group and ∂σ²/∂θ per channel for the output `x` of `source`, as rows of weights."""
    layer, dtype = source.layer, statistics_dtype(x.dtype)
    count = count_per_channel(x)
    centred = (x.to(dtype) - batch.mean.view(1, -1, *[1] * (x.dim() - 2))) * (2 / count)
    with torch.autocast(x.device.type, enabled=False):
        patches = source.input.to(dtype)
        if isinstance(layer, nn.Linear):
            return patches.mean(0, keepdim=True), centred.t() @ patches
        ones = centred.new_full((x.shape[0], layer.groups, *x.shape[2:]), 1 / count)
        return _by_filter(layer, patches, ones), _by_filter(layer, patches, centred)


def _by_filter(layer: Any, patches: Tensor, grad: Tensor) -> Tensor:
    """The sum over positions of `grad` times the patch, for every channel of `grad`."""
    padding = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        patches, padding = F.pad(patches, layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(layer.stride)
    shape = (grad.shape[1], *layer.weight.shape[1:])
    weight, geometry = grad.new_zeros(shape), (layer.stride, padding, layer.dilation)
    _, result, _ = torch.ops.aten.convolution_backward(
        grad, patches, weight, None, *geometry, False, [0], layer.groups, [False, True, False]
    )
    return torch.flatten(result, 1)


def note_source(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook that attaches a `Source` to the output of a convolution or linear layer in training."""
    if torch.compiler.is_compiling() or not layer.training or type(output) is not Tensor or output.is_inference():
        return
    given = args[0] if args else kwargs["input"]
    rank = 2 if isinstance(layer, nn.Linear) else len(layer.stride) + 2  # type: ignore[arg-type]
    if output.dim() == rank and type(given) is Tensor and not given.is_inference():
        setattr(output, NOTE, Source(layer, given.detach(), (given._version, output._version)))


def take_source(x: Tensor) -> Source | None:
    """Remove and return the `Source` of `x`; None if there is none or a tensor was changed in place since."""
    source: Source | None = getattr(x, NOTE, None)
    if source is None:
        return None
    delattr(x, NOTE)
    return source if source.versions == (source.input._version, x._version) else None


def watch_sources(model: nn.Module, _options: Mapping[str, Any] | None = None) -> None:
    """Add the hook to every convolution and linear layer of `model`."""
    for module in model.modules():
        wanted = isinstance(module, (_ConvNd, nn.Linear)) and not isinstance(module, _ConvTransposeNd)
        if wanted and note_source not in module._forward_hooks.values():
            module.register_forward_hook(note_source, with_kwargs=True)


def unwatch_sources(model: nn.Module) -> None:
    """Remove the hooks of `watch_sources`."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if hook is note_source]:
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "cbn",
    "title": "Cross-Iteration Batch Normalization",
    "paper": "Yao et al., Cross-Iteration Batch Normalization, CVPR 2021",
    "replace": CrossIterationBatchNorm.replacing,
    "state": "moments of the last k − 1 batches and their slopes: k − 1 copies of the weights",
    "scales_with_run": True,
    "surgery": watch_sources,
    "settle": unwatch_sources,
}
