"""Stand-ins for the operations that the CUDA kernels are made of: their documented semantics in plain arithmetic.

They insist on what the kernels read without looking: dtypes, layouts, and the order of arguments in torch's own schema.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memnorm.functional import statistics_dtype


def wide(x):
    return x.to(statistics_dtype(x.dtype))


def along(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def dims(x):
    return [0, *range(2, x.dim())]


def assert_readable(x, *vectors):
    """Data in one of the layouts that the kernels know, vectors dense and in the statistics' dtype."""
    assert x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    for vector in vectors:
        if vector is not None:
            assert vector.dtype == statistics_dtype(x.dtype)
            assert vector.shape == x.shape[1:2]
            assert vector.is_contiguous()


def batch_norm_update_stats(input, running_mean, running_var, momentum):
    assert running_mean is None
    assert running_var is None
    assert_readable(input)
    var, mean = torch.var_mean(wide(input), dims(input), correction=0)
    return mean, var


def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    assert_readable(input, weight, bias, mean, invstd)
    y = (input - along(mean, input)) * along(invstd, input)
    y = y if weight is None else y * along(weight, input)
    y = y if bias is None else y + along(bias, input)
    return y.to(input.dtype)


def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    assert_readable(input, weight, mean, invstd)
    assert (grad_out.dtype, grad_out.stride()) == (input.dtype, input.stride())
    assert weight is not None or not (weight_g or bias_g)
    sum_dy = wide(grad_out).sum(dims(input))
    sum_dy_xmu = (wide(grad_out) * (input - along(mean, input))).sum(dims(input))
    sums = (sum_dy, sum_dy_xmu) if input_g else (None, None)
    return *sums, sum_dy_xmu * invstd if weight_g else None, sum_dy if bias_g else None


def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert_readable(input, weight, mean, invstd, sum_dy, sum_dy_xmu)
    assert (grad_out.dtype, grad_out.stride()) == (input.dtype, input.stride())
    assert (count.dtype, count.shape) == (torch.int32, (1,))
    total = count.sum()
    centred = (input - along(mean, input)) * along(invstd.square() * sum_dy_xmu / total, input)
    scale = invstd if weight is None else invstd * weight
    return ((grad_out - along(sum_dy / total, input) - centred) * along(scale, input)).to(input.dtype)


STAND_INS = [batch_norm_update_stats, batch_norm_elemt, batch_norm_backward_reduce, batch_norm_backward_elemt]


def by_schema(stand_in: Callable) -> Callable:
    """`stand_in` with positional arguments as torch's schema orders them."""
    arguments = getattr(torch.ops.aten, stand_in.__name__).default._schema.arguments
    names = [argument.name for argument in arguments]
    return lambda *values: stand_in(**dict(zip(names, values, strict=True)))
