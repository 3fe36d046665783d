"""The 3-D task: grey and white matter of the MNI T1 template that nilearn contains, at 1 mm, with noise in the brain.

The template is exactly mirror-symmetric, so only its left hemisphere is used. From back to front it is cut into six
slabs of equal amounts of tissue. One of them chooses learning rates; fold k tests on the k-th of the other five. A run
trains on cubes of `PATCH` voxels that do not touch the slab it is evaluated on, each a micro-batch.

`run` takes the place of `memnorm.lab.runner.run`, which is for images with one label each. The seed of a run is its
fold. A run takes minutes and writes no checkpoints: an interrupted one begins again.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memnorm.lab import environment
from memnorm.lab.data.source import mix
from memnorm.lab.listen import Listener
from memnorm.lab.runner import evaluation_due
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import RunFolder, Store
from memnorm.lab.training import learning_rate, set_threads, with_norm

DATA = "nilearn's MNI template"
PATCH = 16
NOISE = 0.1  # standard deviation; grey and white matter are 0.2 apart
BRIGHTNESS = 0.25  # a training cube is multiplied by a factor between 1 - BRIGHTNESS and 1 + BRIGHTNESS
SLABS, CHOOSING = 6, 3  # how many, and the one that chooses learning rates
TISSUES = {"grey": 1, "white": 2}
Block = tuple[Tensor, Tensor]  # intensities and labels


@functools.cache
def hemisphere() -> Block:
    """Intensities in [0, 1] and a label per voxel (0 other, 1 grey, 2 white matter) of the left half."""
    import nibabel
    import nilearn

    folder = Path(nilearn.__file__).parent / "datasets/data"
    t1, grey, white = (
        torch.tensor(
            nibabel.load(folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz").get_fdata(dtype="float32")
        )
        / 255
        for kind in ("t1", "gm", "wm")
    )
    left = slice(0, t1.shape[0] // 2)
    return t1[left], ((grey > 0.5).long() + 2 * (white > 0.5).long())[left]


def split(volume: Block, spec: RunSpec) -> tuple[list[Block], Block]:
    """The blocks before and behind the slab to evaluate on, and that slab: of the fold, or with `holdout` the one that
    chooses learning rates.
    """
    tissue = (volume[1] > 0).sum((0, 2)).cumsum(0)
    ends = [int((tissue <= tissue[-1] * number / SLABS).sum()) for number in range(SLABS + 1)]
    folds = [number for number in range(SLABS) if number != CHOOSING]
    tested = CHOOSING if spec.holdout else folds[spec.seed]
    first, last = ends[tested], ends[tested + 1]
    cuts = (slice(0, first), slice(first, last), slice(last, None))
    before, slab, behind = ((volume[0][:, cut], volume[1][:, cut]) for cut in cuts)
    return [one for one in (before, behind) if one[1].any()], slab


def patches(blocks: Sequence[Block], centers: Tensor, count: int, seed: int) -> list[Block]:
    """Noisy cubes of random brightness around random voxels of tissue; `centers` holds (block, x, y, z) of them all."""
    generator = torch.Generator().manual_seed(seed)
    cubes = []
    for block, *center in centers[torch.randint(len(centers), (count,), generator=generator)].tolist():
        t1, labels = blocks[block]
        starts = [min(max(0, at - PATCH // 2), size - PATCH) for at, size in zip(center, t1.shape, strict=True)]
        cube = tuple(slice(start, start + PATCH) for start in starts)
        factor = 1 + BRIGHTNESS * (2 * torch.rand(1, generator=generator) - 1)
        cubes.append((factor * noisy(t1[cube], generator)[None, None], labels[cube][None]))
    return cubes


def noisy(t1: Tensor, generator: torch.Generator) -> Tensor:
    """The scan has no skull: what is not brain is 0 and stays 0."""
    return torch.where(t1 > 0, t1 + NOISE * torch.randn(t1.shape, generator=generator), 0)


def tissue_of(blocks: Sequence[Block]) -> Tensor:
    return torch.cat([F.pad(labels.nonzero(), (1, 0), value=number) for number, (_, labels) in enumerate(blocks)])


def block(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, out, 3, padding=1, bias=False), nn.BatchNorm3d(out), nn.ReLU())


class UNet(nn.Module):
    """Two scales, five convolutions with a norm each."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.high = nn.Sequential(block(1, width), block(width, width))
        self.low = nn.Sequential(nn.MaxPool3d(2), block(width, 2 * width), block(2 * width, 2 * width))
        self.out = nn.Sequential(block(3 * width, width), nn.Conv3d(width, 1 + len(TISSUES), 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.high(x)
        low = F.interpolate(self.low(high), size=high.shape[2:])
        return self.out(torch.cat([high, low], 1))


def run(
    spec: RunSpec,
    store: Store,
    *,
    execution: Execution,
    data_root: Path | None = None,
    listener: Listener | None = None,
    wait: bool = False,
) -> dict[str, Any]:
    """Train and return the result; a finished run is not repeated."""
    folder = store.run(spec)
    with folder.held(wait):
        return folder.result() or _train(spec, folder, set_threads(execution), listener or Listener())


def _train(spec: RunSpec, folder: RunFolder, threads: int, listener: Listener) -> dict[str, Any]:
    blocks, slab = split(hemisphere(), spec)
    centers = tissue_of(blocks)
    torch.manual_seed(mix(spec.seed, "weights"))
    model = with_norm(UNet(**spec.model_options), spec).train()
    optimizer = torch.optim.SGD(
        model.parameters(), spec.base_learning_rate, momentum=spec.momentum, weight_decay=spec.weight_decay
    )
    session = environment.session("cpu", threads, 0)
    folder.begin(session)
    folder.write_metrics([])
    listener.began(spec, 0)
    lines: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for iteration in range(spec.iterations):
        optimizer.param_groups[0]["lr"] = learning_rate(spec, iteration)
        optimizer.zero_grad()
        for t1, labels in patches(blocks, centers, spec.accumulate, mix(spec.seed, "patches", iteration)):
            (F.cross_entropy(model(t1), labels) / spec.accumulate).backward()
        optimizer.step()
        listener.stepped(spec, iteration + 1)
        if evaluation_due(spec, iteration + 1):
            seconds = round(time.perf_counter() - begun, 3)
            lines.append({"iteration": iteration + 1, **evaluate(model, slab, spec.seed), "seconds": seconds})
            folder.add_metrics(lines[-1])
            listener.evaluated(spec, lines[-1])
    result = {"status": "finished", "name": spec.name, "final": lines[-1], "seconds": lines[-1]["seconds"]}
    parameters = sum(one.numel() for one in model.parameters())
    return folder.finish({**result, "parameters": parameters, "environment": session})


@torch.no_grad()
def evaluate(model: nn.Module, slab: Block, seed: int) -> dict[str, float]:
    """Dice of both tissues in percent; the error is 100 minus their mean. The slab is cut into cubes as in training:
    the statistics of instance norm depend on the size of its input.
    """
    t1, labels = noisy(slab[0], torch.Generator().manual_seed(mix(seed, "noise"))), slab[1]
    found = torch.zeros_like(labels)
    starts = ([min(at, size - PATCH) for at in range(0, size, PATCH)] for size in t1.shape)
    model.eval()
    for corner in itertools.product(*starts):
        cube = tuple(slice(at, at + PATCH) for at in corner)
        if t1[cube].any():
            found[cube] = model(t1[cube][None, None]).argmax(1)[0]
    model.train()
    dice = {}
    for name, tissue in TISSUES.items():
        ours, wanted = found == tissue, labels == tissue
        dice[f"dice_{name}"] = 200 * ((ours & wanted).sum() / (ours.sum() + wanted.sum())).item()
    return {"test_error": 100 - sum(dice.values()) / len(dice), **dice}
