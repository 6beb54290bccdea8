"""Names of sign classes, groups of them, and what a mirror image does to each."""

from __future__ import annotations

GTSDB_CLASSES = (
    "speed-limit-20",
    "speed-limit-30",
    "speed-limit-50",
    "speed-limit-60",
    "speed-limit-70",
    "speed-limit-80",
    "end-of-speed-limit-80",
    "speed-limit-100",
    "speed-limit-120",
    "no-overtaking",
    "no-overtaking-by-trucks",
    "crossroads-with-priority",
    "priority-road",
    "give-way",
    "stop",
    "no-traffic-both-ways",
    "no-trucks",
    "no-entry",
    "danger",
    "bend-left",
    "bend-right",
    "bends",
    "uneven-road",
    "slippery-road",
    "road-narrows",
    "road-works",
    "traffic-signals",
    "pedestrians",
    "children",
    "cyclists",
    "snow",
    "wild-animals",
    "end-of-all-limits",
    "turn-right-ahead",
    "turn-left-ahead",
    "ahead-only",
    "ahead-or-right",
    "ahead-or-left",
    "keep-right",
    "keep-left",
    "roundabout",
    "end-of-no-overtaking",
    "end-of-no-overtaking-by-trucks",
)
"""The 43 classes of GTSDB and GTSRB; a class's number there is its place here."""

_GTSDB_GROUPS = {
    "prohibitory": (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 15, 16),
    "danger": (11, *range(18, 32)),
    "mandatory": tuple(range(33, 41)),
    "other": (6, 12, 13, 14, 17, 32, 41, 42),
}
GTSDB_SUPERCLASSES = {GTSDB_CLASSES[number]: group for group, numbers in _GTSDB_GROUPS.items() for number in numbers}
"""Class → the group that GTSDB's own competition scores it in; "other" is scored in none."""

_SWAPPED = ((19, 20), (33, 34), (36, 37), (38, 39))
_SYMMETRIC = (11, 12, 13, 15, 17, 18, 22, 26, 35)
GTSDB_MIRRORED = {
    **{GTSDB_CLASSES[a]: GTSDB_CLASSES[b] for pair in _SWAPPED for a, b in (pair, pair[::-1])},
    **{GTSDB_CLASSES[number]: GTSDB_CLASSES[number] for number in _SYMMETRIC},
}
"""Class → what it is in a mirror; an image with a class that is not here must not be flipped."""
