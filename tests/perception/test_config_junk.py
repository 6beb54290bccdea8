"""Any value for any setting is taken, or refused in one line that names the setting; what is taken can be written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.config import flatten, from_json, override, to_json
from perception.errors import UserError
from pipelines.configs import CONFIGS, named_config

JUNK = [
    "",
    " ",
    "nan",
    "-inf",
    "NaN",
    "-1",
    "0",
    "-0.0",
    "1e400",
    "1e308",
    "1e-320",
    "9" * 30,
    "9" * 5000,
    "[" * 5000,
    "true",
    "null",
    "None",
    "[]",
    "[1,2,3,4]",
    "[-1,0]",
    '["a"]',
    "[NaN]",
    "[[1]]",
    "{}",
    '{"a":1}',
    '"x"',
    "x",
    "é",
    "=",
    "a=b",
    "../..",
    "1_000",
    "\uff10",
    "'",
]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_is_taken_or_refused_by_name(data: st.DataObject) -> None:
    config = named_config(data.draw(st.sampled_from(sorted(CONFIGS))))
    name = data.draw(st.sampled_from(sorted(flatten(config))))
    value = data.draw(st.one_of(st.sampled_from(JUNK), st.floats().map(repr), st.integers().map(str)))
    try:
        changed = override(config, [f"{name}={value}"])
    except UserError as error:
        # Of a pair of settings that do not fit the other one may be named.
        assert name.split(".")[-1] in str(error) or name.split(".")[0] in str(error)
        assert "\n" not in str(error)
        return
    assert from_json(to_json(changed), "config.json") == changed


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.seed=1000000000000001", "train.seed = 1000000000000001: must be at most 1000000000000000"),
        ("augment.rotate_degrees=181", "augment.rotate_degrees = 181.0: must be from 0 to 180"),
        ("augment.rotate_degrees=-1", "must be from 0 to 180"),
        ("augment.shift_fraction=1.5", "augment.shift_fraction = 1.5: must be from 0 to 1"),
        ("augment.scale_range=[0.001, 1]", "must be from 0.1 to 10"),
        ("train.num_threads_per_rank=100000", "must be from 0 to 4096"),
        ("data.workers_per_rank=100000", "must be from 0 to 1024"),
        ("distributed.timeout_seconds=1e308", "must be from 0 to 1e+07"),
        ("distributed.bucket_mib=1e300", "must be from 0 to 1e+06"),
        ("optim.lr=" + "[" * 100_000, "--set optim.lr: must be of type float"),
    ],
)
def test_what_would_end_as_an_overflow_elsewhere_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        override(named_config("lane"), [assignment])
    assert message in str(caught.value)


def test_a_window_of_a_sign_image_cannot_fill_the_memory() -> None:
    """At a scale of a thousandth the crop of 640 pixels would be cut from 640,000 by 640,000 of them."""
    with pytest.raises(UserError, match=r"augment\.scale_range = \(0\.001, 1\.0\): must be from 0\.1 to 10"):
        override(named_config("sign"), ["augment.scale_range=[0.001, 1]"])
