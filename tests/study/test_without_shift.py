"""The ablation without the correction term is the paper's Eq. 4."""

import torch
from helpers.common import leaf, randn

from study.without_shift import MemorizedBatchNormWithoutShift2d


def test_without_the_shift_between_means_it_is_the_papers_eq_4():
    layer = MemorizedBatchNormWithoutShift2d(3, memory_size=4, dtype=torch.float64)
    batches = [leaf((5, 3, 1, 1), seed=seed).detach() + seed for seed in range(3)]
    for batch in batches:
        layer(batch)
    weights = [0.9**age for age in range(3)]
    newest_first = [batch.flatten(1) for batch in batches[::-1]]
    mean_var = sum(w * b.var(0, correction=0) for w, b in zip(weights, newest_first, strict=True)) / sum(weights)
    torch.testing.assert_close(layer.running_var, mean_var, rtol=0, atol=1e-12)
    layer.recording = False
    x = leaf((5, 3, 1, 1), seed=9)
    values, memory = x.flatten(1), 0.5 * layer.running_weight
    var_hat = (values.var(0, correction=0) * 5 + memory * mean_var) / (5 + memory)
    mean_hat = (values.mean(0) * 5 + memory * layer.running_mean) / (5 + memory)
    expected = ((values - mean_hat) / torch.sqrt(var_hat + layer.eps)).view_as(x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    probe = randn(5, 3, 1, 1, seed=1)
    torch.testing.assert_close(
        torch.autograd.grad(layer(x), x, probe), torch.autograd.grad(expected, x, probe), rtol=0, atol=1e-12
    )
