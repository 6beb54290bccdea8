"""What Open MPI, under Horovod, needs of the machine. No torch here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from perception.errors import UserError

_FOLDER = "/dev/shm"
_FREE_BYTES = 17 << 20
"""Every rank of Open MPI 5 maps 16 MiB there, and wants 5 % more to be free; seen in use: 0.1 MiB a rank."""


def check_shared_memory(local_size: int, environ: Mapping[str, str]) -> None:
    """Raise UserError where Open MPI would abort a rank, without a word, for want of shared memory."""
    if local_size == 1 or "OMPI_MCA_btl_sm_backing_directory" in environ:
        return
    try:
        free = shutil.disk_usage(_FOLDER).free
    except OSError:
        return  # Open MPI takes its session folder.
    if free < _FREE_BYTES:
        raise UserError(
            f"{_FOLDER} has {free / 1e6:.1f} MB free, Open MPI needs {_FREE_BYTES / 1e6:.1f} MB: start the container "
            "with a larger --shm-size or with --ipc=host, or take --set distributed.transport=gloo"
        )
