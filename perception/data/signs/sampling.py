"""How often an epoch holds each image, so that rare classes are seen often enough."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perception.data.signs.sample import SignDataset


def repeat_factors(samples: SignDataset, threshold: float) -> NDArray[np.float64]:
    """(num_images,) times that an epoch holds each image, at least 1 (repeat-factor sampling, Gupta et al. 2019).

    A class that is in a share f of the images below `threshold` asks for sqrt(threshold / f); an image is held as
    often as its rarest class asks for.
    """
    present = [np.unique(samples.truth(index).labels) for index in range(len(samples))]
    images_of_class = np.bincount(np.concatenate([np.empty(0, np.int64), *present]), minlength=len(samples.classes))
    share = images_of_class / max(1, len(samples))
    asked = np.sqrt(threshold / np.where(share > 0, share, 1.0)).clip(min=1.0)
    return np.array([asked[labels].max(initial=1.0) for labels in present], dtype=np.float64)
