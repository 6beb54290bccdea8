"""Data sets: one file a format, generated scenes, augmentation, packed shards, loader."""
