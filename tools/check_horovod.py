"""All-reduce over two ranks by each of Horovod's transports: proof that the built wheel works here.

    .venv/bin/python tools/check_horovod.py

Run by set-up after Horovod was installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RANKS = 2


def rank_main(transport: str) -> None:
    import horovod.torch as horovod
    import torch

    horovod.init()
    tensor = torch.full((1000,), float(horovod.rank() + 1))
    reduced = horovod.allreduce(tensor, op=horovod.Sum, name="check")
    used = "mpi" if horovod.mpi_enabled() else "gloo"
    if horovod.size() != RANKS or used != transport or not bool((reduced == 3.0).all()):
        raise SystemExit(f"all-reduce by {transport}: {used} over {horovod.size()} ranks gave {reduced[0].item()}")
    horovod.shutdown()


def main() -> int:
    from pipelines.launch import launch_ranks

    for transport in ("mpi", "gloo"):
        command = [sys.executable, __file__, "--rank", transport]
        with tempfile.TemporaryDirectory() as folder:
            code = launch_ranks(command, RANKS, "horovod", transport, os.environ, Path(folder))
        if code:
            print(f"Error: all-reduce over {RANKS} ranks by Horovod's {transport} failed with code {code}")
            return 1
        print(f"all-reduce over {RANKS} ranks by Horovod's {transport}: right")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2])
    else:
        sys.exit(main())
