"""A model's name → its complete configuration, with the user's overrides laid over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perception.config import RunConfig, from_json, override
from perception.errors import UserError, nearest
from pipelines import lane, sign

CONFIGS = {**lane.CONFIGS, **sign.CONFIGS}


def named_config(name: str) -> RunConfig:
    """The configuration called `name`, or the one in a file config.json."""
    if name in CONFIGS:
        return CONFIGS[name]()
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"{path}: no such configuration file")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); give config.json of a run folder") from None
        return from_json(text, str(path))
    raise UserError(f'model "{name}" is unknown{nearest(name, CONFIGS)}')


def with_options(config: RunConfig, data: str | None, engine: str | None, assignments: Sequence[str]) -> RunConfig:
    """Overlay the common options, then --set, which has the last word.

    A configuration by name that is meant for generated scenes first takes what a folder of images asks for.
    """
    if data not in (None, "generated") and config.name in sign.ON_FOLDERS and config == CONFIGS[config.name]():
        config = sign.ON_FOLDERS[config.name](config)
    if data is not None:
        config = replace(config, data=replace(config.data, source=data))
    if engine is not None:
        config = override(config, [f"distributed.engine={engine}"])
    return override(config, assignments)
