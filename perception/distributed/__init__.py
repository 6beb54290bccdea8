"""The fused all-reduce layer: the only place that knows of ranks.

    from perception import distributed

    communicator = distributed.connect()                        # solo, Horovod or torch, from the environment
    reducer = distributed.distribute(model, optimizer, communicator)
    loss.backward(); optimizer.step()                           # gradients are means over all ranks
    mean = communicator.average(tensor)

Names are loaded on first use, so that launchers and `--help` never import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perception.distributed.agreement import agreed_batches as agreed_batches
    from perception.distributed.batch_norm import synchronise_batch_norm as synchronise_batch_norm
    from perception.distributed.communicator import Communicator as Communicator
    from perception.distributed.communicator import SoloCommunicator as SoloCommunicator
    from perception.distributed.environment import RankEnvironment as RankEnvironment
    from perception.distributed.environment import rank_environment as rank_environment
    from perception.distributed.reduction import Reducer as Reducer
    from perception.distributed.reduction import Reduction as Reduction
    from perception.distributed.shared_update import Update as Update
    from perception.distributed.shared_update import share_update as share_update
    from perception.distributed.start import connect as connect
    from perception.distributed.start import distribute as distribute

_HOME = {
    "agreed_batches": "agreement",
    "synchronise_batch_norm": "batch_norm",
    "Communicator": "communicator",
    "SoloCommunicator": "communicator",
    "connect": "start",
    "distribute": "start",
    "RankEnvironment": "environment",
    "rank_environment": "environment",
    "Reducer": "reduction",
    "Reduction": "reduction",
    "Update": "shared_update",
    "share_update": "shared_update",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
