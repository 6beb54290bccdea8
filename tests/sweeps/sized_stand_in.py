"""stand_in.py, of a length that depends on its model and its settings: nights of jobs of mixed sizes.

SIZED_STAND_IN_SCALE makes all of them shorter or longer. A checkpoint is written each quarter of a job.
"""

import os
import sys
import zlib
from pathlib import Path

SECONDS = {"sign": (5, 20), "lane-small": (20, 60), "lane": (5, 60), "sign-full": (5, 60)}
"""Model → least and most. A night knows what a model's jobs take in the mean, and no single one's length."""


def length_seconds(argv: list[str], scale: float) -> float:
    """Of a job with this command, wherever its run folder is."""
    low, high = SECONDS[argv[argv.index("train") + 1]]
    settings = " ".join(word for place, word in enumerate(argv) if argv[place - 1] == "--set")
    return scale * (low + (high - low) * zlib.crc32(settings.encode()) / 2**32)


if __name__ == "__main__":
    # Started by `python -I`, which looks for modules in no folder of ours.
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_in

    scale = float(os.environ.get("SIZED_STAND_IN_SCALE", "1"))
    os.environ["STAND_IN_SECONDS"] = str(length_seconds(sys.argv, scale))
    sys.exit(stand_in.main())
