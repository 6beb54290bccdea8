"""Noise tiles and sprites that every scene shares: made once a process, from fixed seeds."""

from __future__ import annotations

import functools

import cv2
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

TILE = 1024


def _spectral_noise(seed: int, size: tuple[int, int], slope: float, stretch: float = 1.0) -> NDArray[np.float32]:
    """Noise of unit deviation that wraps, its power falling as frequency ** -slope.

    `stretch` > 1 lengthens the features along y.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    rows, columns = size
    spectrum = np.fft.rfft2(rng.standard_normal(size))
    frequency_y = np.fft.fftfreq(rows)[:, None] * rows * stretch
    frequency_x = np.fft.rfftfreq(columns)[None, :] * columns
    radius = np.hypot(frequency_y, frequency_x)
    radius[0, 0] = 1.0
    spectrum *= radius ** (-slope / 2)
    spectrum[0, 0] = 0.0
    noise = np.fft.irfft2(spectrum, s=size)
    return np.asarray(noise / noise.std(), dtype=np.float32)


def _to_bytes(noise: NDArray[np.float32], deviation: float) -> Bytes:
    return np.asarray(np.clip(np.rint(128 + noise * deviation), 0, 255), dtype=np.uint8)


@functools.cache
def asphalt() -> Bytes:
    """(1024, 1024) grain, mean 128."""
    fine = _spectral_noise(11, (TILE, TILE), 0.3)
    blotches = _spectral_noise(12, (TILE, TILE), 2.2, stretch=0.35)
    return _to_bytes(0.8 * fine + 0.6 * blotches, 11)


@functools.cache
def verge() -> Bytes:
    """(1024, 1024) tufts of grass or gravel, mean 128."""
    fine = _spectral_noise(21, (TILE, TILE), 0.7)
    clumps = _spectral_noise(22, (TILE, TILE), 2.0)
    return _to_bytes(0.85 * fine + 0.6 * clumps, 26)


@functools.cache
def wear() -> NDArray[np.float32]:
    """(1024, 1024) in [0, 1], evenly spread: paint survives where it exceeds the wear."""
    noise = 0.75 * _spectral_noise(31, (TILE, TILE), 1.2) + 0.65 * _spectral_noise(32, (TILE, TILE), 2.4)
    flat = noise.ravel()
    ranks = np.empty(flat.size, dtype=np.float32)
    ranks[np.argsort(flat, kind="stable")] = np.linspace(0, 1, flat.size, dtype=np.float32)
    return ranks.reshape(noise.shape)


@functools.cache
def clouds() -> Bytes:
    """(512, 2048) cloud cover, 0 clear ... 255 thick."""
    noise = _spectral_noise(41, (512, 2048), 2.9, stretch=2.2)
    return np.clip(128 + noise * 80, 0, 255).astype(np.uint8)


@functools.cache
def sensor_noise() -> NDArray[np.int8]:
    """(1024, 2048) of deviation 24, slightly coarser than a pixel as after demosaicing."""
    rng = np.random.Generator(np.random.PCG64(51))
    noise = cv2.GaussianBlur(rng.standard_normal((TILE, 2 * TILE)).astype(np.float32), (3, 3), 0.5)
    return np.asarray(np.clip(np.rint(noise / noise.std() * 24), -127, 127), dtype=np.int8)


@functools.cache
def ridge() -> NDArray[np.float64]:
    """(4096,) smooth hills, 0 to 1."""
    noise = _spectral_noise(61, (1, 4096), 2.3)[0].astype(np.float64)
    return np.asarray((noise - noise.min()) / (noise.max() - noise.min()))


@functools.cache
def canopy() -> NDArray[np.float64]:
    """(4096,) outline of a row of trees, 0 to 1."""
    noise = _spectral_noise(62, (1, 4096), 1.7)[0].astype(np.float64)
    return np.asarray((noise - noise.min()) / (noise.max() - noise.min()))


NUM_TREES = 12
TREE_HEIGHT, _TREE_WIDTH = 192, 160
TREE_LEVELS = 4


@functools.cache
def tree(kind: int, level: int) -> tuple[Bytes, Bytes]:
    """Colour factors (rows, columns, 3; 128 is one) and alpha (rows, columns) of a tree.

    `kind` is below NUM_TREES, or NUM_TREES for a bush; every level halves the size of the one before.
    """
    if level:
        size = (_TREE_WIDTH >> level, TREE_HEIGHT >> level)
        colour, alpha = tree(kind, 0)
        return (
            np.asarray(cv2.resize(colour, size, interpolation=cv2.INTER_AREA), np.uint8),
            np.asarray(cv2.resize(alpha, size, interpolation=cv2.INTER_AREA), np.uint8),
        )
    rng = np.random.Generator(np.random.PCG64(700 + kind))
    alpha = np.zeros((TREE_HEIGHT, _TREE_WIDTH), np.uint8)
    shade = np.full((TREE_HEIGHT, _TREE_WIDTH), 62.0, np.float32)
    shape = "bush" if kind == NUM_TREES else ("round", "round", "poplar", "conifer")[kind % 4]
    if shape != "bush":
        trunk = np.array([[76, 191], [78, 80], [82, 80], [85, 191]], np.int32)
        cv2.fillPoly(alpha, [trunk], 255, cv2.LINE_AA)
        shade[100:, 76:80] = 84
    num_leaves = {"bush": 500, "round": 620, "poplar": 420, "conifer": 420}[shape]
    # Boughs are clumps; leaves are scattered about them and lit by how high and sunward they sit.
    clumps = rng.uniform(-1, 1, (9, 2)) * 0.55
    for i in range(num_leaves):
        if shape == "conifer":
            level_down = float(rng.uniform(0.0, 1.0)) ** 0.7
            u = float(rng.uniform(-1, 1)) * (level_down + 0.04)
            x, y = 80 + u * 52, 6 + level_down * 150 + abs(u) * 8
            radius = float(rng.uniform(1.5, 4.0))
            up, out = 1 - (level_down * 9) % 1.0, u
        else:
            clump = clumps[int(rng.integers(len(clumps)))]
            angle, reach = float(rng.uniform(0, 2 * np.pi)), float(np.sqrt(rng.uniform(0, 1))) * 0.48
            u, v = clump[0] + reach * np.cos(angle), clump[1] + reach * np.sin(angle)
            half_x, half_y, middle = {"bush": (62, 70, 118), "round": (60, 62, 68), "poplar": (26, 76, 82)}[shape]
            x, y = 80 + u * half_x, middle + v * half_y
            radius = float(rng.uniform(2.0, 5.5))
            up, out = 0.5 - v * 0.5 - 0.5 * reach * np.sin(angle), u
        light = 52 + 82 * up + 14 * out + float(rng.normal(0, 15)) + 8 * i / num_leaves
        centre = (round(x * 16), round(y * 16))
        cv2.circle(alpha, centre, round(radius * 16), 255, -1, cv2.LINE_AA, 4)
        cv2.circle(shade, centre, round(radius * 16), float(np.clip(light, 22, 190)), -1, cv2.LINE_AA, 4)
    shade = np.asarray(cv2.GaussianBlur(shade, (3, 3), 0.7), np.float32)
    tint = np.ones((TREE_HEIGHT, _TREE_WIDTH, 3), np.float32)
    if shape != "bush":
        tint[150:, 70:90] = (1.3, 0.9, 0.9)
    return np.clip(shade[..., None] * tint, 0, 255).astype(np.uint8), alpha


NUM_FACADES = 6


@functools.cache
def facade(kind: int) -> tuple[Bytes, Bytes]:
    """(256, 512, 3) front of a building under neutral light, and (256, 512) where a window is lit at night."""
    rng = np.random.Generator(np.random.PCG64(900 + kind))
    base = ((168, 158, 146), (150, 92, 74), (188, 186, 182), (126, 130, 138), (196, 182, 150), (112, 106, 100))
    image = np.empty((256, 512, 3), np.float32)
    image[:] = base[kind % len(base)]
    image += _spectral_noise(950 + kind, (256, 512), 1.0)[..., None] * 5
    lit = np.zeros((256, 512), np.uint8)
    storeys, bays = int(rng.integers(4, 7)), int(rng.integers(9, 16))
    step_y, step_x = 256 / storeys, 512 / bays
    wide, tall = rng.uniform(0.4, 0.75), rng.uniform(0.45, 0.65)
    for storey in range(storeys):
        ground_floor = storey == storeys - 1
        for bay in range(bays):
            x1 = int((bay + 0.5 - wide / 2) * step_x)
            x2 = int((bay + 0.5 + wide / 2) * step_x)
            y1 = int((storey + 0.5 - tall / 2) * step_y)
            y2 = int((storey + (0.97 if ground_floor else 0.5 + tall / 2)) * step_y)
            glass = rng.uniform(40, 95)
            image[y1:y2, x1:x2] = (glass, glass * 1.06, glass * 1.14)
            image[y1 : y1 + 2, x1:x2] *= 0.6
            image[y2 : y2 + 2, x1:x2] += 18
            if rng.random() < (0.5 if ground_floor else 0.22):
                lit[y1:y2, x1:x2] = int(rng.integers(110, 256))
        image[int(storey * step_y) : int(storey * step_y) + 2] *= 0.85
    return np.clip(image, 0, 255).astype(np.uint8), lit
