"""The built-in data sets: what they hold and which files they need. docs/lab.md has their authors and licences."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from memnorm.lab.data.files import Download, File
from memnorm.lab.errors import DataCorrupt, DataMissing


@dataclass(frozen=True)
class DataSet:
    name: str
    title: str
    about: str
    options: dict[str, int] = field(default_factory=dict)
    downloads: tuple[Download, ...] = ()
    folder: str = ""
    by_hand: str = ""

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(file for item in self.downloads for file in item.files)

    def present(self, root: Path) -> bool:
        """Return True if the files are there. `verify` and the loader check their contents."""
        if self.folder:
            return all((root / self.folder / split).is_dir() for split in ("train", "val"))
        return all((root / file.path).is_file() for file in self.files)

    def command(self, root: Path) -> str:
        return f"memnorm data get {self.name} --data-root {shlex.quote(str(root))}"

    def missing(self, root: Path) -> DataMissing:
        if self.folder:
            return DataMissing(f"{self.title} is not in {root / self.folder}. {self.by_hand}")
        lacking = [file.path for file in self.files if not (root / file.path).is_file()]
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return DataMissing(
            f"{self.title} is not in {root} (no {lacking[0]}{more}). Get it with\n"
            f"    {self.command(root)}{self.by_hand}"
        )

    def read(self, root: Path) -> dict[str, bytes]:
        """Every file's content by its name without folder, checked."""
        if not self.present(root):
            raise self.missing(root)
        try:
            return {Path(file.path).name: file.read(root) for file in self.files}
        except DataCorrupt as error:
            raise DataCorrupt(f"{error}. Replace it with\n    {self.command(root)}") from error


def _cifar(classes: int, size: int, md5: str, *files: File) -> DataSet:
    images = f"50,000 training and 10,000 test images, 32×32 colour, {classes} classes"
    archive = f"cifar-{classes}-python.tar.gz"
    download = Download(f"https://www.cs.toronto.edu/~kriz/{archive}", archive, size, md5, files)
    return DataSet(
        f"cifar{classes}", f"CIFAR-{classes}", f"{images}; crop from 4 pixels of padding, mirror", downloads=(download,)
    )


_FASHION_MNIST = (  # size and MD5 of the file, and of its content
    ("train-images-idx3", 26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 47040016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    ("train-labels-idx1", 29515, "25c81989df183df01b3e8a0aad5dffbe", 60008, "9018921c3c673c538a1fc5bad174d6f9"),
    ("t10k-images-idx3", 4422102, "bef4ecab320f06d8554ea6380940ec79", 7840016, "8181f5470baa50b63fa0f6fddb340f0a"),
    ("t10k-labels-idx1", 5148, "bb300cfdad3c16e7a12a480ee83cd310", 10008, "15d484375f8d13e6eb1aabb0c3f46965"),
)

DATA_SETS = {
    entry.name: entry
    for entry in (
        DataSet(
            name="digits",
            title="Handwritten digits",
            about="1,297 training and 500 test images, 8×8 grey, 10 classes; no augmentation; comes with scikit-learn",
        ),
        _cifar(
            10,
            170_498_071,
            "c58f30108f718f92721af3b95e74349a",
            File("cifar-10-batches-py/data_batch_1", 31_035_704, "c99cafc152244af753f735de768cd75f"),
            File("cifar-10-batches-py/data_batch_2", 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
            File("cifar-10-batches-py/data_batch_3", 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
            File("cifar-10-batches-py/data_batch_4", 31_035_696, "634d18415352ddfa80567beed471001a"),
            File("cifar-10-batches-py/data_batch_5", 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
            File("cifar-10-batches-py/test_batch", 31_035_526, "40351d587109b95175f43aff81a1287e"),
        ),
        _cifar(
            100,
            169_001_437,
            "eb9058c3a382ffc7106e4002c42a8d85",
            File("cifar-100-python/train", 155_249_918, "16019d7e3df5f24257cddd939b257f8d"),
            File("cifar-100-python/test", 31_049_707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
        ),
        DataSet(
            name="fashion-mnist",
            title="Fashion-MNIST",
            about="60,000 training and 10,000 test images, 28×28 grey, 10 classes; crop from 4 pixels of black, mirror",
            by_hand="\nor, with Debian's dataset-fashion-mnist, link it there to /usr/share/datasets/fashion-mnist.",
            downloads=tuple(
                Download(
                    f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}-ubyte.gz",
                    f"fashion-mnist/{name}-ubyte.gz",
                    size,
                    md5,
                    (File(f"fashion-mnist/{name}-ubyte.gz", content_size, content_md5),),
                )
                for name, size, md5, content_size, content_md5 in _FASHION_MNIST
            ),
        ),
        DataSet(
            name="imagenet",
            title="ImageNet (ILSVRC 2012)",
            about="1.28 million training and 50,000 validation images, 1,000 classes; random resized crop, mirror",
            options={"image_size": 224},
            folder="imagenet",
            by_hand=(
                "It cannot be downloaded from here: ask for access at https://image-net.org, get "
                "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, and unpack them into imagenet/train and "
                "imagenet/val with one folder per class, such as imagenet/val/n01440764/*.JPEG."
            ),
        ),
        DataSet(
            name="synthetic",
            title="Synthetic images",
            about="noisy patterns, one per class, made on the spot; size and number by options; crop and mirror",
            options={"classes": 10, "channels": 3, "image_size": 32, "train": 512, "test": 256},
        ),
    )
}
