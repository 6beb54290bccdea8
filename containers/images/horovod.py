"""Horovod's wheel for the torch of this image: found in a cache, or built. Run in a build, by the image's Python.

    horovod.py [--build] TOOLS CACHED OUT     exit code 1: not in the cache, and not asked to build

TOOLS holds the project's horovod_wheel.py, which knows what a wheel must fit; OUT gets the folder of the one found.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description="Find or build Horovod's wheel.")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("tools", type=Path)
    parser.add_argument("cached", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    # Nothing is written beside the tools: they are bound read-only.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(options.tools))
    console, horovod_wheel = importlib.import_module("console"), importlib.import_module("horovod_wheel")

    target = horovod_wheel.probe(Path(sys.executable), os.environ)
    folder = options.out / target.key
    cached = horovod_wheel.cached_wheel(options.cached / target.key)
    if cached is not None:
        shutil.copytree(cached.parent, folder)
        print(f"found {target.key}")
        return 0
    if not options.build:
        print(f"no wheel for {target.key} in the cache: it will be built")
        return 1
    log = Path("/tmp/horovod.log")
    try:
        horovod_wheel.build_wheel(Path(sys.executable), target, folder, console.Console(log), os.environ)
    except console.SetupError as error:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
