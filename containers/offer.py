"""How an image is offered to the engine: layers as they are in the registry, or unpacked from gzip on the way. Pure.

An engine unpacks gzip slowly, and layer after layer. The digest of an unpacked layer stands in the image's own
configuration, so an engine that is given a layer that way verifies it as strictly, against the same image ID.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from containers.manifests import DOCKER_MANIFEST, ImageConfig, Manifest, digest_of

_WORTH_BYTES = 100_000
"""Compressed; below, it makes no difference."""
_PLAIN_TYPES = {
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip": "application/vnd.oci.image.layer.v1.tar",
}


@dataclass(frozen=True)
class OfferedLayer:
    digest: str
    """Under which the engine asks for it."""
    unpacked: bool
    there: bool
    """The engine holds it, under this digest or another."""


@dataclass(frozen=True)
class Offer:
    raw: bytes
    """The manifest that the engine is shown."""
    media_type: str
    layers: tuple[OfferedLayer, ...]
    """In the order of the image's."""

    @property
    def digest(self) -> str:
        return digest_of(self.raw)

    def place(self, digest: str) -> int | None:
        """The lowest layer of this digest."""
        return next((place for place, layer in enumerate(self.layers) if layer.digest == digest), None)


def as_it_is(manifest: Manifest) -> Offer:
    layers = tuple(OfferedLayer(layer.digest, unpacked=False, there=False) for layer in manifest.layers)
    return Offer(manifest.raw, manifest.media_type, layers)


def unpacked(manifest: Manifest, config: ImageConfig, num_there: int, there_as_they_are: bool) -> Offer:
    """Every layer by its unpacked digest where that is worth it.

    The lowest `num_there` the engine holds. It knows them by the digests they came under: unpacked ones if they came
    through here, else the registry's (`there_as_they_are`).
    """
    rows, layers = [], []
    for place, (layer, diff_id) in enumerate(zip(manifest.layers, config.diff_ids, strict=True)):
        there = place < num_there
        plain_type = _PLAIN_TYPES.get(layer.media_type)
        plain = plain_type is not None and layer.size >= _WORTH_BYTES and not (there and there_as_they_are)
        # The size of what is not unpacked yet is not known. Engines that want to know it are offered it as it is.
        row = {"mediaType": plain_type if plain else layer.media_type, "size": layer.size}
        rows.append({**row, "digest": diff_id if plain else layer.digest})
        layers.append(OfferedLayer(diff_id if plain else layer.digest, plain, there))
    if not any(layer.unpacked for layer in layers):
        return as_it_is(manifest)
    config_type = "application/vnd.oci.image.config.v1+json"
    if manifest.media_type == DOCKER_MANIFEST:
        config_type = "application/vnd.docker.container.image.v1+json"
    config_row = {
        "mediaType": manifest.config.media_type or config_type,
        "size": manifest.config.size,
        "digest": manifest.config.digest,
    }
    data = {"schemaVersion": 2, "mediaType": manifest.media_type, "config": config_row, "layers": rows}
    return Offer(json.dumps(data).encode(), manifest.media_type, tuple(layers))


def num_layers_there(config: ImageConfig, chains: Sequence[Sequence[str]]) -> int:
    """How many of the lowest layers an engine holds that has images of these layers.

    >>> from containers.manifests import Platform
    >>> num_layers_there(ImageConfig(Platform("linux", "amd64"), "", ("a", "b", "c")), [("a", "x"), ("a", "b", "y")])
    2
    """
    longest = 0
    for chain in chains:
        shared = 0
        for ours, theirs in zip(config.diff_ids, chain, strict=False):
            if ours != theirs:
                break
            shared += 1
        longest = max(longest, shared)
    return longest
