"""Labelled images: a bundled set of digits or one file, every fifth image held out."""

import dataclasses
import functools
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.documents import DataError

__all__ = ["DataError", "Images", "TrainingImages", "load"]

DIGITS = "digits"
ENDING = ".npz"
ALLOWED = f"allowed: '{DIGITS}', or one {ENDING} file with the arrays 'images' and 'labels'"

LARGEST = np.iinfo(np.int32).max  # labels are int32
EVERY = 5  # one image in so many is held out: interleaved, since files are often sorted


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Images and what they show, split for training and for validation.

    Attributes:
      name: what the images are, for a reader.
      images: float32 [n, height, width, channels], about -1 to 1.
      labels: int32 [n], from 0 to num_classes - 1.
      sha256: of the shape, images and labels, in hexadecimal.
      num_classes: of labels.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    sha256: str
    num_classes: int

    counted: ClassVar[str] = "images"
    unit: ClassVar[str] = "image"
    targets: ClassVar[int] = 1
    bytes_per_target: ClassVar[None] = None

    @property
    def fits(self) -> dict[str, int]:
        """The fields of a model's configuration that follow from the data.

        Raises:
          DataError: the images are not square.
        """
        _, height, width, channels = self.images.shape
        if height != width:
            raise DataError(f"the images of {self.name} are {height} x {width}; allowed: squares")
        return {"image_size": height, "channels": channels, "num_classes": self.num_classes}

    @property
    def nbytes(self) -> int:
        """Bytes of the array of images."""
        return self.images.nbytes

    @functools.cached_property
    def training(self) -> "TrainingImages":
        """The images to train on."""
        return TrainingImages(self.images, self.labels, np.flatnonzero(~self._held_out))

    def validation(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The same `count` held-out images each time, spread evenly; fewer if there are fewer.

        Returns:
          float32 [at most count, height, width, channels] and int32 [at most count].
        """
        places = np.flatnonzero(self._held_out)
        count = min(count, len(places))
        chosen = places[np.arange(count) * len(places) // count]
        return self.images[chosen], self.labels[chosen]

    @property
    def _held_out(self) -> np.ndarray:
        return np.arange(len(self.labels)) % EVERY == EVERY // 2


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingImages:
    """A source of records for Grain: the images to train on, by their number.

    Attributes:
      images: float32 [n, height, width, channels], held-out ones among them.
      labels: int32 [n].
      places: int64 [m], those to train on.
    """

    images: np.ndarray
    labels: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        """An image, float32 [height, width, channels], and its label.

        Raises:
          IndexError: there are not so many.
        """
        place = self.places[index]
        return self.images[place], self.labels[place]


def load(paths: Sequence[str]) -> Images:
    """Reads images.

    Args:
      paths: one name: `digits`, for the 1,797 of 8 x 8 pixels that come with scikit-learn, or a
        `.npz` file. That has `images`, [n, height, width] or [n, height, width, channels], either
        uint8, which is scaled to -1 to 1, or floating point, which is taken as it is; and `labels`,
        integers [n] from 0.

    Raises:
      DataError: there is no such file, or it holds something else.
    """
    if len(paths) != 1:
        raise DataError(f"images come from one place, not {len(paths)}; {ALLOWED}")
    if paths[0] == DIGITS:
        return _digits()
    if not paths[0].lower().endswith(ENDING):
        raise DataError(f"'{paths[0]}' is no set of images; {ALLOWED}")
    return _from_file(Path(paths[0]))


def _digits() -> Images:
    from sklearn.datasets import load_digits  # here, since it takes long to load

    digits = load_digits()
    return _images("scikit-learn's digits", digits.images / 8 - 1, digits.target)


def _from_file(path: Path) -> Images:
    try:
        with path.open("rb") as file:  # which NumPy would leave open where it is damaged
            read = _arrays(np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read the images in '{path}': {error}") from error
    for name in ("images", "labels"):
        if name not in read:
            raise DataError(f"'{path}' has no array '{name}'; {ALLOWED}")
    _check(path, read["images"], read["labels"])
    images = read["images"]
    if images.dtype == np.uint8:
        images = images / 127.5 - 1
    return _images(str(path), images, read["labels"])


def _arrays(loaded: Any) -> dict[str, np.ndarray]:
    if isinstance(loaded, np.ndarray):  # a single one, which has no name
        return {}
    return {name: loaded[name] for name in ("images", "labels") if name in loaded}


def _check(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    if images.ndim not in (3, 4) or not (images.dtype == np.uint8 or images.dtype.kind == "f"):
        raise DataError(
            f"the images in '{path}' are {images.dtype} of shape {images.shape}; allowed: uint8 or "
            "floating point, [n, height, width] or [n, height, width, channels]"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(
            f"the labels in '{path}' are {labels.dtype} of shape {labels.shape}; one integer is "
            f"needed for each of the {len(images)} images"
        )
    if images.size == 0 or len(images) < EVERY:
        raise DataError(
            f"'{path}' has images of shape {images.shape}; at least {EVERY} are needed, one in "
            f"{EVERY} being held out for validation"
        )
    if not np.isfinite(images).all():
        raise DataError(f"the images in '{path}' have a NaN or an infinity among them")
    if labels.min() < 0 or labels.max() > LARGEST:
        raise DataError(
            f"the labels in '{path}' are from {labels.min()} to {labels.max()}; allowed: 0 to "
            f"{LARGEST}"
        )


def _images(name: str, images: np.ndarray, labels: np.ndarray) -> Images:
    images, labels = images.astype(np.float32), labels.astype(np.int32)
    if images.ndim == 3:
        images = images[..., None]
    digest = hashlib.sha256(repr(images.shape).encode())
    digest.update(images.astype("<f4").tobytes())
    digest.update(labels.astype("<i4").tobytes())
    return Images(name, images, labels, digest.hexdigest(), num_classes=int(labels.max()) + 1)
