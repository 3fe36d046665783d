"""Whole trainings against the literal reference: outputs, gradients and every buffer after every step."""

import pytest
import torch
from helpers.common import LAYERS, SHAPES, leaf, randn
from torch import nn

import memnorm
from memnorm.reference import ReferenceBatchNorm, memorized_moments

ATOL = 1e-10
MEMORY_SIZES = [1, 2, 20, None]


class Net(nn.Module):
    """Two norms with something to learn between them, for inputs of any rank: (N, C, …) -> (N, C, …)."""

    def __init__(self, norm, channels):
        super().__init__()
        self.first, self.second = norm(channels), norm(channels)
        self.mix = nn.Parameter(torch.eye(channels, dtype=torch.float64) + 0.3 * randn(channels, channels, seed=7))
        self.out = nn.Parameter(randn(channels, channels, seed=8))

    def forward(self, x):
        x = torch.tanh(self.first(torch.einsum("dc,nc...->nd...", self.mix, x)))
        return torch.einsum("dc,nc...->nd...", self.out, self.second(x))


def sizes_of_step(shape, step):
    """Batch sizes and spatial sizes that vary over the trajectory."""
    return (2 + (step * 3) % 5, shape[1], *(size + step % 2 for size in shape[2:]))


def trajectories(shape, memory_size, double_forward, steps):
    """Both networks trained side by side; yields them after each step with their outputs and gradients."""
    options = {"memory_size": memory_size, "decay": 0.9, "strength": 0.1}
    fast = Net(lambda c: LAYERS[len(shape)][0](c, dtype=torch.float64, **options), shape[1])
    slow = Net(lambda c: ReferenceBatchNorm(c, **options), shape[1])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (fast, slow)]
    if double_forward:
        memnorm.double_forward(fast, optimizers[0])
    for step in range(steps):
        if step == steps // 2:
            for net, layer_type in ((fast, memnorm.layers.MemorizedBatchNorm), (slow, ReferenceBatchNorm)):
                for layer in (module for module in net.modules() if isinstance(module, layer_type)):
                    layer.set_strength(0.7) if net is fast else setattr(layer, "strength", 0.7)
        x, target = leaf(sizes_of_step(shape, step), seed=step), randn(*sizes_of_step(shape, step), seed=1000 + step)
        results = []
        for net, optimizer in zip((fast, slow), optimizers, strict=True):
            recorders = [layer for layer in net.modules() if isinstance(layer, ReferenceBatchNorm)]
            for layer in recorders:
                layer.recording = not double_forward
            point = x.detach().clone().requires_grad_()
            y = net(point)
            optimizer.zero_grad()
            (y - target).square().mean().backward()
            gradients = [point.grad, *(parameter.grad.clone() for parameter in net.parameters())]
            optimizer.step()
            if double_forward and recorders:
                for layer in recorders:
                    layer.recording = True
                with torch.no_grad():
                    net(point.detach())
            results.append((y.detach(), gradients))
        yield fast, slow, results


def assert_memory_is_that_of_the_reference(fast, slow):
    """Every buffer of the layer against the whole batches that the reference keeps."""
    k, kept = fast.memory_size, slow.memory
    alphas = [fast.decay**age for age in range(len(kept))]
    mean, var = memorized_moments(kept, alphas)
    weight = torch.tensor(sum(a * len(batch) for a, batch in zip(alphas, kept, strict=True)), dtype=torch.float64)
    torch.testing.assert_close(
        (fast.running_mean, fast.running_var, fast.running_weight), (mean, var, weight), rtol=0, atol=ATOL
    )
    if k is not None:
        counts = [float(len(batch)) for batch in kept] + [0.0] * (k - len(kept))
        assert fast.memory_count.tolist() == counts
        for row, batch in enumerate(kept):
            torch.testing.assert_close(fast.memory_mean[row], batch.mean(0), rtol=0, atol=ATOL)
            torch.testing.assert_close(fast.memory_var[row], batch.var(0, correction=0), rtol=0, atol=ATOL)


@pytest.mark.parametrize("double_forward", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("memory_size", MEMORY_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_equal_the_reference_in_outputs_gradients_and_buffers(shape, memory_size, double_forward):
    for step, (fast, slow, results) in enumerate(trajectories(shape, memory_size, double_forward, steps=50)):
        (y_fast, grads_fast), (y_slow, grads_slow) = results
        torch.testing.assert_close(y_fast, y_slow, rtol=0, atol=ATOL)
        torch.testing.assert_close(grads_fast, grads_slow, rtol=0, atol=ATOL)
        for name in ("first", "second"):
            ours, reference = getattr(fast, name), getattr(slow, name)
            assert int(ours.num_batches_tracked) == step + 1
            assert_memory_is_that_of_the_reference(ours, reference)
        if step % 10 == 0:
            x = leaf(shape, seed=5000 + step).detach()
            fast.eval(), slow.eval()
            torch.testing.assert_close(fast(x), slow(x), rtol=0, atol=ATOL)
            fast.train(), slow.train()
    torch.testing.assert_close(list(fast.parameters()), list(slow.parameters()), rtol=0, atol=ATOL)
