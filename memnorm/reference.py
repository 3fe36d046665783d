"""The definitions of the paper, transcribed literally: the slow reference that the tests compare everything with.

Remembered batches are kept whole and summed value by value (Eq. 5). Nothing is pooled, merged or differentiated by
hand; autograd computes the gradient. `docs/equations.md` maps the symbols to the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def memorized_moments(batches: Sequence[Tensor], alphas: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Eq. 5 over batches of shape (n_i, C), each value of batch i weighted by alpha_i.

    μ̂ = Σ_i α_i Σ_j x_i^(j) / Σ_i α_i n_i        σ̂² = Σ_i Σ_j α_i (x_i^(j) − μ̂)² / Σ_i α_i n_i
    """
    denominator: Any = sum(alpha * len(batch) for batch, alpha in zip(batches, alphas, strict=True))
    mean_hat: Any = sum(alpha * batch.sum(dim=0) for batch, alpha in zip(batches, alphas, strict=True)) / denominator
    squares = (alpha * ((batch - mean_hat) ** 2).sum(dim=0) for batch, alpha in zip(batches, alphas, strict=True))
    var_hat: Any = sum(squares) / denominator
    return mean_hat, var_hat


def alpha(strength: float, decay: float, age: int) -> float:
    """Eq. 8, λ η^(k−i), with the age k − i: 0 for the newest remembered batch. The current batch has α = 1."""
    return strength * decay**age


def values_per_channel(x: Tensor) -> Tensor:
    """(N, C, …) as a list of n = N·… values per channel: (n, C)."""
    return x.transpose(0, 1).flatten(1).T


class ReferenceBatchNorm(nn.Module):
    """Memorized batch normalization as the paper writes it.

    Training: the current batch and the `memory_size` recent ones (None: all) are one large batch; μ̂ and σ̂² are its
    weighted moments (Eq. 5), the output is Eq. 7. Inference: there is no current batch, λ cancels, and the same
    equations run over the remembered batches alone. With nothing remembered, inference takes mean 0 and variance 1, as
    torch's layers do.
    """

    def __init__(
        self,
        num_features: int,
        *,
        memory_size: int | None = 20,
        decay: float = 0.9,
        strength: float = 0.5,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.memory_size, self.decay, self.strength, self.eps = memory_size, decay, strength, eps
        self.weight = nn.Parameter(torch.ones(num_features, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(num_features, dtype=torch.float64))
        self.memory: list[Tensor] = []  # whole batches (n_i, C), newest first
        self.recording = True

    def moments(self, current: Tensor | None) -> tuple[Tensor, Tensor]:
        """μ̂ and σ̂² of the memory, with the current batch (n, C) in training, without one at inference."""
        batches = list(self.memory)
        strength = 1.0 if current is None else self.strength
        alphas = [alpha(strength, self.decay, age) for age in range(len(batches))]
        if current is not None:
            batches.append(current)
            alphas.append(1.0)
        if not batches:
            return torch.zeros_like(self.bias), torch.ones_like(self.weight)
        return memorized_moments(batches, alphas)

    def forward(self, x: Tensor) -> Tensor:
        current = values_per_channel(x) if self.training else None
        y = _affine(x, self.weight, self.bias, *self.moments(current), self.eps)
        if current is not None and self.recording:
            self.remember(current)
        return y

    def remember(self, current: Tensor) -> None:
        self.memory.insert(0, current.detach().clone())
        if self.memory_size is not None:
            del self.memory[self.memory_size :]


def large_batch_norm(
    batches: Sequence[Tensor], alphas: Sequence[float], weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> list[Tensor]:
    """Batch norm of several batches (n_i, C, …) as one large batch, each value of batch i counted α_i times.

    Autograd differentiates through the moments into every batch. Two-way memory approximates this; with all α_i = 1 it
    is torch's batch norm of the concatenated batches.
    """
    mean, var = memorized_moments([values_per_channel(batch) for batch in batches], alphas)
    return [_affine(batch, weight, bias, mean, var, eps) for batch in batches]


def _affine(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    shape = (1, -1) + (1,) * (x.dim() - 2)
    x_hat = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + eps)
    return weight.view(shape) * x_hat + bias.view(shape)


class ReferenceTwoWayBatchNorm(nn.Module):
    """Two-way memorized batch norm with everything kept: the values x of each batch, and the g and x̂ of each backward.

    Each entry has the weight `strength` times the decays of all updates since (call `update()` after each). With
    `decay=None` an update on m images has the decay max(1/2, 1 − 1/4 · √(m / 32)). Sums run over all kept values;
    nothing is pooled.
    """

    def __init__(
        self, num_features: int, *, decay: float | None = None, strength: float = 1.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.decay, self.strength, self.eps = decay, strength, eps
        self.weight = nn.Parameter(torch.ones(num_features, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(num_features, dtype=torch.float64))
        self.updates = 0
        self.images = [0]  # of each update; the last entry counts those since the last update
        self.forwards: list[tuple[int, Tensor]] = []  # (update, x) with x (n, C)
        self.backwards: list[tuple[int, Tensor, Tensor]] = []  # (update, g, x̂)

    def alpha(self, update: int) -> float:
        return self.strength * math.prod(map(self.decay_after, self.images[update : self.updates]))

    def decay_after(self, images: int) -> float:
        return max(1 / 2, 1 - 1 / 4 * math.sqrt(images / 32)) if self.decay is None else self.decay

    def forward(self, x: Tensor) -> Tensor:
        current = values_per_channel(x.detach())
        batches = [*(batch for _, batch in self.forwards), current]
        mean, var = memorized_moments(batches, [*(self.alpha(update) for update, _ in self.forwards), 1.0])
        self.forwards.append((self.updates, current))
        self.images[-1] += len(x)
        y: Tensor = _LargeBatchGradient.apply(x, self.weight, self.bias, mean, var, self)
        return y

    def update(self) -> None:
        """The weights have changed."""
        self.updates += 1
        self.images.append(0)


class _LargeBatchGradient(torch.autograd.Function):
    """dx = γ/√(σ̂² + ε) · (g − ā − x̂·q̄), with ā and q̄ the means of g and g·x̂ over all kept values and the current."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.layer = layer
        return _affine(x, weight, bias, mean, var, layer.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        layer: ReferenceTwoWayBatchNorm = ctx.layer
        g = values_per_channel(grad)
        x_hat = (values_per_channel(x) - mean) / torch.sqrt(var + layer.eps)
        kept = [(layer.alpha(update), *entry) for update, *entry in layer.backwards] + [(1.0, g, x_hat)]
        total = sum(alpha * len(one) for alpha, one, _ in kept)
        mean_g = sum(alpha * one.sum(0) for alpha, one, _ in kept) / total
        mean_gx = sum(alpha * (one * hat).sum(0) for alpha, one, hat in kept) / total
        layer.backwards.append((layer.updates, g, x_hat))
        grad_x = weight / torch.sqrt(var + layer.eps) * (g - mean_g - x_hat * mean_gx)
        back = grad_x.T.unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)
        return back, (g * x_hat).sum(0), g.sum(0), None, None, None


def algorithm_1(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_function: Callable[[Tensor, Tensor], Tensor],
    learning_rate: float,
    *,
    double_forward: bool = True,
) -> list[float]:
    """The paper's Algorithm 1, iterated: train `network` (with `ReferenceBatchNorm` layers) by plain SGD and return the
    losses.

    With `double_forward=False` the first forward records, and there is no second: MBN-1.
    """
    layers = [module for module in network.modules() if isinstance(module, ReferenceBatchNorm)]
    losses = []
    for x, target in batches:
        # First forward propagation, and backpropagation
        set_recording(layers, not double_forward)
        loss = loss_function(network(x), target)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter.sub_(learning_rate * gradient)
        # Second forward propagation: the same batch, the new weights; its moments are recorded
        if double_forward:
            set_recording(layers, True)
            with torch.no_grad():
                network(x)
        losses.append(loss.item())
    return losses


def set_recording(layers: Iterable[ReferenceBatchNorm], on: bool) -> None:
    for layer in layers:
        layer.recording = on
