"""Decoded images kept in memory: of large photographs decoding takes longer than cutting a crop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.signs.sample import SignDataset, SignSample, SignTruth


class CachedImages:
    """A SignDataset that decodes an image once, until `budget_bytes` are used; later ones are decoded each time."""

    def __init__(self, samples: SignDataset, budget_bytes: int) -> None:
        self.samples, self.budget_bytes = samples, budget_bytes
        self.classes, self.report = samples.classes, samples.report
        self._images: dict[int, NDArray[np.uint8]] = {}
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getstate__(self) -> dict[str, Any]:
        """A loader process begins with none: they would be sent to it one by one."""
        return {**self.__dict__, "_images": {}, "_used_bytes": 0}

    def truth(self, index: int) -> SignTruth:
        return self.samples.truth(index)

    def sample(self, index: int) -> SignSample:
        """Its image must not be written to."""
        kept = self._images.get(index)
        if kept is not None:
            return SignSample(kept, self.samples.truth(index))
        sample = self.samples.sample(index)
        if self._used_bytes + sample.image.nbytes <= self.budget_bytes:
            sample.image.flags.writeable = False
            self._images[index] = sample.image
            self._used_bytes += sample.image.nbytes
        return sample
