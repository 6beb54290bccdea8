"""The peers as tasks of the project's own training loop: the lane task with another network, loss and decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from perception.config import RunConfig
from perception.data import lane_targets
from perception.data.lane_targets import LaneBatch, LaneExample
from perception.data.sample import LanePrediction
from perception.geometry import Geometry
from perception.losses import Losses
from perception.model_config import LaneModelConfig
from perception.tasks import LaneTask, Task
from tests.baselines import row_anchor, segmentation


@dataclass(frozen=True)
class Peer:
    build: Callable[[LaneModelConfig], nn.Module]
    loss: Callable[[Any, LaneBatch, LaneModelConfig], Losses]
    """Of what the network says of a batch."""
    decode: Callable[[Any, tuple[Geometry, ...], LaneModelConfig], list[LanePrediction]]
    collated: Callable[[LaneBatch], LaneBatch] = lambda batch: batch
    """What becomes of a batch; a peer that cannot learn some lanes counts them here."""


PEERS = {
    "row-anchor": Peer(row_anchor.RowAnchorModel, row_anchor.loss, row_anchor.decode, collated=row_anchor.count_lost),
    "segmentation": Peer(segmentation.SegmentationModel, segmentation.loss, segmentation.decode),
}
OURS = "lane-small"


class PeerTask(LaneTask):
    """Images, labels, augmentation and metrics are those of the lane task."""

    def __init__(self, config: RunConfig, peer: Peer) -> None:
        super().__init__(config)
        self.peer = peer

    def build_model(self) -> nn.Module:  # type: ignore[override]
        return self.peer.build(self.model_config)

    def collate(self, examples: Sequence[LaneExample]) -> LaneBatch:
        return self.peer.collated(lane_targets.collate(examples))

    def loss(self, model: nn.Module, batch: LaneBatch) -> Losses:
        return self.peer.loss(model(batch.images), batch, self.model_config)

    @torch.no_grad()
    def predict(self, model: nn.Module, batch: LaneBatch) -> list[LanePrediction]:
        return self.peer.decode(model(batch.images), batch.geometries, self.model_config)


def task_named(name: str, config: RunConfig) -> Task:
    return LaneTask(config) if name == OURS else PeerTask(config, PEERS[name])
