"""The image decoder: one result for every kind of file, or an error that names it."""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from perception.data.images import image_size, locate_images, read_image
from perception.data.sample import ReadReport
from perception.errors import UserError

HEIGHT, WIDTH = 24, 40


def colours() -> NDArray[np.uint8]:
    """(HEIGHT, WIDTH, 3) RGB, red rising to the right and green downwards."""
    rgb = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    rgb[..., 0] = np.linspace(0, 250, WIDTH)
    rgb[..., 1] = np.linspace(0, 250, HEIGHT)[:, None]
    rgb[..., 2] = 30
    return rgb


def write(path: Path, pixels: NDArray[np.generic]) -> Path:
    """Encode `pixels`, in OpenCV's order of channels, by the suffix of `path`."""
    done, data = cv2.imencode(path.suffix, pixels)
    assert done
    path.write_bytes(data.tobytes())
    return path


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    tiff = b"MM\x00\x2a" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    body = b"Exif\x00\x00" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def test_colours_come_as_rgb(tmp_path: Path) -> None:
    image = read_image(write(tmp_path / "a.png", colours()[..., ::-1]))
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, colours())


def test_grey_is_repeated(tmp_path: Path) -> None:
    grey = colours()[..., 0]
    np.testing.assert_array_equal(read_image(write(tmp_path / "a.png", grey)), np.stack([grey] * 3, axis=2))


def test_alpha_is_dropped(tmp_path: Path) -> None:
    transparent = np.dstack([colours()[..., ::-1], np.zeros((HEIGHT, WIDTH), np.uint8)])
    np.testing.assert_array_equal(read_image(write(tmp_path / "a.png", transparent)), colours())


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_sixteen_bits_keep_the_upper_eight(tmp_path: Path, channels: int) -> None:
    deep = np.full((HEIGHT, WIDTH, channels), 40000, np.uint16)
    image = read_image(write(tmp_path / "a.png", deep))
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert (image == 40000 >> 8).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_ignored(tmp_path: Path, orientation: int) -> None:
    plain = write(tmp_path / "plain.jpg", colours()[..., ::-1])
    turned = tmp_path / "turned.jpg"
    turned.write_bytes(with_orientation(plain.read_bytes(), orientation))
    # The file does carry the tag: a decoder that obeys it turns the image.
    obeyed = cv2.imdecode(np.frombuffer(turned.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    assert (obeyed.shape[:2] == (WIDTH, HEIGHT)) == (orientation >= 5)
    np.testing.assert_array_equal(read_image(turned), read_image(plain))
    assert image_size(turned) == (HEIGHT, WIDTH)


def test_names_beyond_ascii(tmp_path: Path) -> None:
    assert read_image(write(tmp_path / "straße 道路.png", colours())).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_cut_file_is_an_error_naming_it(tmp_path: Path, suffix: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    path = write(tmp_path / f"cut{suffix}", noise)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=rf"cut\{suffix}: image .*copy it again"):
        read_image(path)


def test_text_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("not an image")
    for name in ("text.jpg", "missing.jpg"):
        for function in (read_image, image_size):
            with pytest.raises(UserError, match=name):
                function(tmp_path / name)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp"])
def test_size_is_that_of_the_decoded_image(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", colours())
    assert image_size(path) == read_image(path).shape[:2] == (HEIGHT, WIDTH)


def test_size_behind_a_large_comment(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jpg", colours())
    data = path.read_bytes()
    comment = b"\xff\xfe" + struct.pack(">H", 65000) + bytes(64998)
    path.write_bytes(data[:2] + comment * 2 + data[2:])
    assert image_size(path) == (HEIGHT, WIDTH)


def test_a_twin_of_another_suffix_is_found(tmp_path: Path) -> None:
    write(tmp_path / "20.png", colours())
    report = ReadReport()
    listed = [("20.png", "list:1"), ("20.jpg", "list:2"), ("21.jpg", "list:3"), ("20.png", "list:4")]
    assert locate_images(tmp_path, listed, False, report) == ["20.png", "20.png", "", "20.png"]
    assert report.examples == {
        "image .jpg found as .png: used": "list:2",
        "image listed twice: kept twice": "list:4",
    }


def test_missing_images_are_counted_and_named(tmp_path: Path) -> None:
    listed = [(f"{letter}.jpg", "list") for letter in "abcd"]
    assert locate_images(tmp_path, [], True, ReadReport()) == []
    with pytest.raises(UserError, match=r"4 of 4 listed images are missing, first: a\.jpg, b\.jpg, c\.jpg;"):
        locate_images(tmp_path, listed, True, ReadReport())
