"""A 3-D U-Net at batch size 2 on a real brain: grey and white matter from the MNI T1 template that nilearn contains.

A demonstration, not evidence: one template, one seed, seconds of training per norm. The left hemisphere trains,
the right one tests. The template is exactly mirror-symmetric, so the whole right hemisphere would be the training data
in a mirror; training therefore keeps to the back two thirds and the test to the front.

pip install ".[examples]"; python examples/brain_segmentation.py
"""

import argparse
from pathlib import Path

import nibabel
import nilearn
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm

NORMS = {"BN": None, "instance": "instance", "group": "group", "two-way": "two_way"}
TRAIN, TEST = (slice(0, 48), slice(0, 76)), (slice(50, 98), slice(76, 116), slice(0, 94))  # left back, right front
PATCH = 16


def load() -> tuple[Tensor, Tensor]:
    """The T1 volume, scaled, and a label per voxel (0 other, 1 grey, 2 white matter), at 2 mm."""
    folder = Path(nilearn.__file__).parent / "datasets/data"
    volumes = []
    for kind in ("t1", "gm", "wm"):
        image = nibabel.load(folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz")
        volume = torch.tensor(image.get_fdata(dtype="float32"))[None, None] / 255
        volumes.append(F.avg_pool3d(volume, 2)[0, 0])
    t1, grey, white = volumes
    return (t1 - t1.mean()) / t1.std(), (grey > 0.5).long() + 2 * (white > 0.5).long()


def block(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, out, 3, padding=1, bias=False), nn.BatchNorm3d(out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.high = nn.Sequential(block(1, width), block(width, width))
        self.low = nn.Sequential(nn.MaxPool3d(2), block(width, 2 * width), block(2 * width, 2 * width))
        self.out = nn.Sequential(block(3 * width, width), nn.Conv3d(width, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.high(x)
        return self.out(torch.cat([high, F.interpolate(self.low(high), scale_factor=2)], 1))


def patches(t1: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cubes around random voxels of grey or white matter."""
    tissue = labels.nonzero()
    centers = tissue[torch.randint(len(tissue), (count,), generator=generator)]
    corners = (centers - PATCH // 2).clamp(min=0).minimum(torch.tensor(t1.shape) - PATCH)
    cuts = [tuple(slice(start, start + PATCH) for start in corner) for corner in corners.tolist()]
    return torch.stack([t1[cut] for cut in cuts])[:, None], torch.stack([labels[cut] for cut in cuts])


def train(model: nn.Module, t1: Tensor, labels: Tensor, *, steps: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(steps):
        x, y = patches(t1, labels, batch_size, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def dice(model: nn.Module, t1: Tensor, labels: Tensor, tissue: int) -> float:
    found, wanted = model.eval()(t1[None, None]).argmax(1)[0] == tissue, labels == tissue
    return 2 * float((found & wanted).sum() / (found.sum() + wanted.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    t1, labels = load()
    print(f"batch size {options.batch_size}, {options.steps} steps; a demonstration, one seed\nDice      grey   white")
    for name, norm in NORMS.items():
        torch.manual_seed(0)
        model = memnorm.convert(UNet(), norm) if norm else UNet()
        train(model, t1[TRAIN], labels[TRAIN], steps=options.steps, batch_size=options.batch_size)
        grey, white = (dice(model, t1[TEST], labels[TEST], tissue) for tissue in (1, 2))
        print(f"{name:9} {grey:.3f}  {white:.3f}", flush=True)


if __name__ == "__main__":
    main()
