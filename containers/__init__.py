"""NGC-style images: names, lock file, build, pull, run. Imports nothing of the other folders and no torch."""
