"""From an image file to a square array of bytes, by the usual ImageNet transforms.

Training: a random part of the image (8 to 100 % of its area, aspect 3/4 to 4/3), scaled to the size, mirrored or not.
Evaluation: the shorter side scaled to size · 256/224, then the central square. EXIF orientation is ignored, as
torchvision's image folders do, so that results compare.
"""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from memnorm.lab.errors import DataCorrupt

# Only these decoders run, whatever a file is called: some of Pillow's others start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"))

Box = tuple[int, int, int, int]


def training_view(path: Path | str, size: int, draw: random.Random) -> np.ndarray:
    """(3, size, size) bytes of a random part of the image."""
    image = decode(path)
    view = image.crop(random_box(image.width, image.height, draw)).resize((size, size), Image.Resampling.BILINEAR)
    if draw.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _array(view)


def evaluation_view(path: Path | str, size: int) -> np.ndarray:
    """(3, size, size) bytes of the image's centre."""
    image = decode(path)
    if max(image.size) > 8 * min(image.size):  # scaled up, a long thin strip would fill the memory
        image = image.crop(_centre(image.width, image.height, *(min(side, 8 * min(image.size)) for side in image.size)))
    shorter = round(size * 256 / 224)
    width, height = (side * shorter // min(image.size) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return _array(scaled.crop(_centre(width, height, size, size)))


def decode(path: Path | str) -> Image.Image:
    """The whole image in RGB: grey is repeated, transparency dropped, CMYK and palettes converted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about broken EXIF, which is not used, and lost transparency
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image.load()
                if image.mode == "F" or image.mode.startswith("I"):
                    raise ValueError(f"pixels of kind {image.mode}; convert the image to 8 bits per channel")
                return image.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataCorrupt(f"{path} is too large to be decoded safely ({error}). Scale it down or delete it.") from error
    except Exception as error:  # decoders raise many kinds of errors
        reason = "no image of a known format" if isinstance(error, Image.UnidentifiedImageError) else error
        raise DataCorrupt(f"{path} cannot be read as an image ({reason}). Replace it or delete it.") from error


def random_box(width: int, height: int, draw: random.Random) -> Box:
    """A part of random area and aspect at a random place: ten tries, then the largest centred part that is allowed."""
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = draw.randint(0, width - wide), draw.randint(0, height - high)
            return left, top, left + wide, top + high
    wide = max(min(width, round(height * 4 / 3)), 1)
    high = max(min(height, round(width * 4 / 3)), 1)
    return _centre(width, height, wide, high)


def _centre(width: int, height: int, wide: int, high: int) -> Box:
    left, top = round((width - wide) / 2), round((height - high) / 2)
    return left, top, left + wide, top + high


def _array(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)
