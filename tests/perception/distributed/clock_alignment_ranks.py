"""One rank of `test_clock_alignment.py`: writes what it finds its clock's offset to be.

`python clock_alignment_ranks.py FOLDER ENGINE TRANSPORT SHIFTS`, SHIFTS being JSON: by how many
seconds each rank's clock is late, or null for the process's own clock.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed.clock_alignment import clock_offset, clock_offset_seconds, shared_clock_name


def main(folder: Path, engine: str, transport: str, shifts: list[float | None]) -> None:
    communicator = distributed.connect(DistributedConfig(engine=engine, transport=transport, timeout_seconds=60))
    shift = shifts[communicator.rank]
    if shift is None:
        found = clock_offset(communicator)
    else:
        found = clock_offset(communicator, lambda: time.perf_counter() - shift, f"clock late by {shift}")
    report = {
        "offset": found.offset_seconds,
        "error": found.error_seconds,
        "name": shared_clock_name(),
        # On the kernel's own scale, which time namespaces do not shift.
        "late": time.clock_gettime(time.CLOCK_REALTIME) - time.perf_counter(),
        "same": clock_offset_seconds(communicator),
    }
    (folder / f"rank{communicator.rank}.json").write_text(json.dumps(report))
    communicator.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
