"""Images: what is read and how it is scaled, what is refused, and what is held out."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from experiments import images
from experiments.images import DataError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (23, 5, 3), np.uint8)
LABELS = RNG.permutation(np.arange(23) % 7)


def write(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_digits():
    read = images.load(["digits"])
    assert read.images.shape == (1797, 8, 8, 1)
    assert read.images.dtype == np.float32
    assert (read.images.min(), read.images.max()) == (-1, 1)
    assert abs(read.images.mean()) < 0.5
    reference = load_digits()
    np.testing.assert_array_equal(read.images.reshape(1797, 64), reference.data / 8 - 1)
    np.testing.assert_array_equal(read.labels, reference.target)
    assert read.labels.dtype == np.int32
    assert read.num_classes == 10


def test_bytes_are_scaled_and_floats_are_taken_as_they_are(tmp_path):
    read = images.load([write(tmp_path / "bytes.npz", images=PIXELS, labels=LABELS)])
    assert read.images.shape == (23, 5, 3, 1)
    np.testing.assert_allclose(read.images[..., 0], PIXELS / 255 * 2 - 1, atol=1e-6)
    assert read.images.dtype == np.float32
    assert read.num_classes == 7
    floats = RNG.normal(size=(23, 5, 3, 2))
    again = images.load([write(tmp_path / "floats.npz", images=floats, labels=LABELS)])
    np.testing.assert_array_equal(again.images, floats.astype(np.float32))


def test_one_in_five_is_held_out_and_the_others_are_for_training(tmp_path):
    read = images.load([write(tmp_path / "a.npz", images=PIXELS, labels=LABELS)])
    held_out = [2, 7, 12, 17, 22]
    pixels, labels = read.validation(99)
    np.testing.assert_array_equal(pixels, read.images[held_out])
    np.testing.assert_array_equal(labels, LABELS[held_out])
    others = [i for i in range(23) if i not in held_out]
    assert len(read.training) == len(others)
    for record, i in zip(read.training, others, strict=True):
        np.testing.assert_array_equal(record[0], read.images[i])
        assert record[1] == LABELS[i]
        assert record[1].dtype == np.int32


def test_validation_is_the_same_each_time_and_spread_evenly():
    read = images.load(["digits"])
    pixels, labels = read.validation(36)
    assert pixels.shape == (36, 8, 8, 1)
    assert labels.shape == (36,)
    np.testing.assert_array_equal(pixels, read.validation(36)[0])
    # 359 are held out; a tenth of them are about one in ten, from first to last.
    everything = read.validation(359)[0]
    places = [int(np.flatnonzero((everything == p).all((1, 2, 3)))[0]) for p in pixels]
    assert {b - a for a, b in itertools.pairwise(places)} <= {9, 10}
    assert places[0] == 0
    assert places[-1] >= 348


def test_the_digest_is_of_shape_images_and_labels(tmp_path):
    read = images.load([write(tmp_path / "a.npz", images=PIXELS, labels=LABELS)])
    scaled = (PIXELS / 127.5 - 1).astype(np.float32)
    content = b"(23, 5, 3, 1)" + scaled.tobytes() + LABELS.astype(np.int32).tobytes()
    assert read.sha256 == hashlib.sha256(content).hexdigest()
    turned = write(tmp_path / "b.npz", images=PIXELS.reshape(23, 3, 5), labels=LABELS)
    assert images.load([turned]).sha256 != read.sha256


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": LABELS}, "no array 'images'"),
        ({"images": PIXELS}, "no array 'labels'"),
        ({"images": PIXELS.astype(int), "labels": LABELS}, "int64 of shape"),
        ({"images": PIXELS[0], "labels": LABELS[:5]}, r"uint8 of shape \(5, 3\)"),
        ({"images": PIXELS, "labels": LABELS[:-1]}, "each of the 23 images"),
        ({"images": PIXELS, "labels": LABELS / 2}, "labels .* are float64"),
        ({"images": PIXELS, "labels": LABELS - 1}, "from -1 to 5; allowed: 0 to 2147483647"),
        ({"images": PIXELS, "labels": LABELS + 2**31}, "allowed: 0 to 2147483647"),
        ({"images": PIXELS[:4], "labels": LABELS[:4]}, "at least 5"),
        ({"images": PIXELS[:, :0], "labels": LABELS}, r"shape \(23, 0, 3\)"),
        ({"images": np.where(PIXELS > 250, np.nan, 0), "labels": LABELS}, "NaN or an infinity"),
        ({"images": np.array([None] * 9), "labels": LABELS}, "cannot read .* allow_pickle"),
    ],
)
def test_unusable_arrays_are_refused(tmp_path, arrays, message):
    path = write(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        images.load([path])
    assert path in str(error.value)


def test_other_names_and_files_are_refused(tmp_path):
    for paths, message in [
        ([], "one place, not 0"),
        (["digits", "digits"], "one place, not 2"),
        (["mnist"], "'mnist' is no set of images; allowed: 'digits'"),
        ([str(tmp_path / "missing.npz")], r"cannot read the images in .*missing\.npz.*No such"),
    ]:
        with pytest.raises(DataError, match=message):
            images.load(paths)
    for content in (b"", b"PK\x03\x04 cut", b"text"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match="cannot read the images"):
            images.load([str(tmp_path / "a.npz")])
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, PIXELS)  # one array, whatever its name
    with pytest.raises(DataError, match=r"a\.npz' has no array 'images'"):
        images.load([str(tmp_path / "a.npz")])
