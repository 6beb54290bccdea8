"""Configurations by name or file, and what the command line lays over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perception.config import to_json, validate
from perception.errors import UserError
from pipelines.configs import CONFIGS, named_config, with_options


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_name_gives_a_complete_configuration_of_that_name(name: str) -> None:
    config = named_config(name)
    validate(config)
    assert config.name == name and named_config(name) == config
    assert f"python -m pipelines train {name} " in (CONFIGS[name].__doc__ or ""), "the docstring holds the command"


def test_a_file_gives_what_was_stored(tmp_path: Path) -> None:
    config = replace(named_config("lane-small"), name="mine")
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert named_config(str(path)) == config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lane_small", 'model "lane_small" is unknown; did you mean "lane-small"?'),
        ("resnet", 'model "resnet" is unknown'),
        ("", 'model "" is unknown; allowed: '),
        ("none.json", "none.json: no such configuration file"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        named_config(name)
    assert message in str(caught.value)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data, message in [(b"\xff\xfe", "cannot be read"), (b"{", "not JSON"), (b'{"a": 1}', "not a run config")]:
        path.write_bytes(data)
        with pytest.raises(UserError, match=message) as caught:
            named_config(str(path))
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_options_are_laid_over_and_set_has_the_last_word() -> None:
    base = named_config("lane")
    assert with_options(base, None, None, []) == base
    changed = with_options(base, "/data", "torch", ["distributed.engine=horovod", "optim.lr=1"])
    assert (changed.data.source, changed.distributed.engine, changed.optim.lr) == ("/data", "horovod", 1.0)
    assert replace(changed, data=base.data, distributed=base.distributed, optim=base.optim) == base


def test_a_wrong_engine_is_told() -> None:
    with pytest.raises(UserError, match=r'distributed\.engine = "mpi" is unknown'):
        with_options(named_config("lane"), None, "mpi", [])
