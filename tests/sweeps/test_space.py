"""Search spaces: ranges, grids, hashes, and samples as assignments and back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.planning.space import Parameter, SearchSpace, assignments, check_sampler, key, parameter_from, sample_of

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)


def parameters(name: str = "p") -> st.SearchStrategy[Parameter]:
    positive = st.floats(1e-6, 1e3)
    plain = st.tuples(st.floats(-1e3, 1e3), positive).map(lambda t: Parameter(name, "float", t[0], t[0] + t[1]))
    logs = st.tuples(positive, st.floats(1.01, 1e4)).map(
        lambda t: Parameter(name, "float", t[0], t[0] * t[1], log=True)
    )
    whole = st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.booleans()).map(
        lambda t: Parameter(name, "int", float(t[0]), float(t[0] + t[1]), log=t[2])
    )
    steps = st.tuples(st.integers(-50, 50), st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.05, 2.0])).map(
        lambda t: parameter_from(
            name, {"low": t[0] / 10, "high": round(t[0] / 10 + t[1] * t[2], 10), "step": t[2]}, 0.0, "plan"
        )
    )
    choices = st.lists(st.integers() | st.booleans() | st.text(max_size=5), min_size=2, max_size=5).map(tuple)
    listed = choices.filter(lambda values: len({json.dumps(value) for value in values}) == len(values)).map(
        lambda values: Parameter(name, "choice", choices=values)
    )
    return plain | logs | whole | steps | listed


@settings(deadline=None)
@given(parameters(), st.floats(0, 1))
def test_every_place_of_a_range_is_a_value_of_it_and_leads_back(parameter: Parameter, place: float) -> None:
    value = parameter.at(place)
    assert parameter.contains(value)
    assert 0 <= parameter.position(value) <= 1
    again = parameter.at(parameter.position(value))
    if parameter.kind == "float" and not parameter.step:
        assert again == pytest.approx(value, rel=1e-9, abs=1e-9)
    else:
        assert json.dumps(again) == json.dumps(value)


@settings(deadline=None)
@given(parameters(), FINITE)
def test_the_nearest_value_is_allowed_and_none_is_nearer(parameter: Parameter, value: float) -> None:
    found = parameter.nearest_to(value)
    if parameter.kind == "choice":
        assert found is None or parameter.contains(found)
        return
    assert found is not None and parameter.contains(found)
    assert isinstance(found, (int, float))
    for place in (0.0, 0.3, 0.5, 0.8, 1.0):
        other = parameter.at(place)
        assert isinstance(other, (int, float))
        assert abs(found - value) <= abs(other - value) + 1e-6 * max(1.0, abs(value))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a.b", "c", "d.e.f"]), st.booleans() | st.integers() | FINITE | st.text()))
def test_a_sample_survives_as_assignments_to_the_last_bit(sample: dict[str, Any]) -> None:
    assert sample_of(assignments(sample)) == sample
    assert key(sample_of(assignments(sample))) == key(sample)


def test_lists_are_tuples_in_samples() -> None:
    sample = {"model.backbone_widths": (8, 16, 24, 32)}
    assert assignments(sample) == ["model.backbone_widths=[8, 16, 24, 32]"]
    assert sample_of(assignments(sample)) == sample


@settings(deadline=None)
@given(st.lists(parameters(), min_size=1, max_size=3), st.integers(0, 99))
def test_drawn_samples_are_of_the_space(drawn: list[Parameter], seed: int) -> None:
    space = SearchSpace(tuple(_named(parameter, f"p{place}") for place, parameter in enumerate(drawn)))
    assert space.problem(space.draw(random.Random(seed))) == ""


def test_a_range_that_its_step_does_not_divide_is_refused_with_the_nearest_end() -> None:
    with pytest.raises(
        UserError, match=r"p: high = 1\.0 is not low \+ a multiple of step = 0\.3; the nearest one is 0\.9"
    ):
        parameter_from("x", {"low": 0.0, "high": 1.0, "step": 0.3}, 0.5, "p")
    with pytest.raises(UserError, match="the nearest one is 11"):
        parameter_from("x", {"low": 1, "high": 10, "step": 5}, 4, "p")
    # What only rounding of binary fractions would refuse is right.
    assert len(parameter_from("x", {"low": 0.1, "high": 0.7, "step": 0.1}, 0.5, "p").grid()) == 7


@settings(deadline=None)
@given(st.integers(-100, 100), st.integers(1, 30), st.integers(1, 9))
def test_the_proposed_end_is_accepted(low: int, length: int, step: int) -> None:
    table = {"low": low / 10, "high": (low + length) / 10, "step": step / 10}
    try:
        parameter_from("x", table, 0.5, "p")
    except UserError as error:
        table["high"] = float(str(error).rsplit(" ", 1)[1])
        assert table["high"] > table["low"]
        parameter_from("x", table, 0.5, "p")


@pytest.mark.parametrize(
    ("table", "default", "message"),
    [
        ({"low": 1, "hihg": 2}, 1, 'field hihg is unknown; did you mean "high"'),
        ({"low": 1}, 1, "give low and high, or choices"),
        ({"low": 1.5, "high": 3}, 1, "low = 1.5 must be a whole number"),
        ({"low": 2.0, "high": 1.0}, 1.0, "low = 2.0 must be below high = 1.0"),
        ({"low": 0.0, "high": 1.0, "log": True}, 1.0, "low = 0.0 must be above 0"),
        ({"low": 1, "high": 3, "step": 1, "log": True}, 1, "log and step exclude each other"),
        ({"low": 1, "high": 3}, "text", "is no number"),
        ({"low": 1, "high": 3}, True, "is no number"),
        ({"low": 1, "high": 3, "log": 1}, 1, "log = 1 must be true or false"),
        ({"low": 1, "high": 3, "step": -1}, 1, "step = -1 must be above 0"),
        ({"low": 1.0, "high": float("inf")}, 1.0, "high = inf must be finite"),
        ({"choices": [1]}, 1, "at least 2 values"),
        ({"choices": [1, 2], "low": 1}, 1, "not both"),
        ({"choices": [1, 1.0]}, 1.0, "stands twice"),
        ({"low": 1, "high": 3, "grid_points": -1}, 1, "grid_points = -1"),
    ],
)
def test_a_wrong_parameter_is_refused_in_one_line(table: dict[str, Any], default: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"^plan\.toml: x: ") as caught:
        parameter_from("x", table, default, "plan.toml: x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_grid_has_every_combination_exactly_once() -> None:
    space = SearchSpace(
        (
            parameter_from("a", {"low": 0.1, "high": 0.5, "step": 0.1}, 0.1, ""),
            parameter_from("b", {"low": 1, "high": 4}, 1, ""),
            parameter_from("c", {"choices": ["x", "y", "z"]}, "x", ""),
            parameter_from("d", {"low": 1e-4, "high": 1e-2, "log": True, "grid_points": 3}, 1e-3, ""),
        )
    )
    points = space.grid()
    assert len(points) == space.num_grid_points() == 5 * 4 * 3 * 3
    assert len({key(point) for point in points}) == len(points)
    assert all(space.problem(point) == "" for point in points)
    assert {point["a"] for point in points} == {0.1, 0.2, 0.3, 0.4, 0.5}
    assert sorted({point["d"] for point in points}) == pytest.approx([1e-4, 1e-3, 1e-2])


def test_a_grid_without_values_or_of_too_many_points_is_refused() -> None:
    with pytest.raises(UserError, match=r"^models\.sampler: x: the grid sampler needs the values of this range"):
        check_sampler("grid", SearchSpace((Parameter("x", "float", 0.0, 1.0),)), 1, "models.sampler")
    large = SearchSpace(tuple(Parameter(f"p{n}", "int", 1.0, 100.0) for n in range(3)))
    with pytest.raises(UserError, match="1,000,000 points"):
        large.grid()


def test_a_grid_of_few_whole_numbers_has_no_point_twice() -> None:
    values = Parameter("x", "int", 1.0, 3.0, grid_points=9).grid()
    assert values == (1, 2, 3)


@pytest.mark.parametrize(
    ("sampler", "objectives", "message"),
    [
        ("tep", 1, 'sampler = "tep" is unknown; did you mean "tpe"'),
        ("cmaes", 1, "cmaes searches numbers only, c has choices"),
        ("cmaes", 2, "cmaes"),
    ],
)
def test_a_sampler_that_cannot_search_the_space_is_refused(sampler: str, objectives: int, message: str) -> None:
    space = SearchSpace((Parameter("a", "float", 0.0, 1.0), Parameter("c", "choice", choices=(1, 2))))
    with pytest.raises(UserError, match=message):
        check_sampler(sampler, space, objectives, "sampler")


def test_the_hash_depends_on_what_is_allowed_and_on_nothing_else() -> None:
    lr = {"low": 1e-3, "high": 1e-1, "log": True}
    a, b = parameter_from("a", lr, 0.1, ""), parameter_from("b", {"choices": [1, 2]}, 1, "")
    space = SearchSpace((a, b))
    assert space.hash() == SearchSpace((b, a)).hash()
    assert space.hash() == SearchSpace((parameter_from("a", {**lr, "low": 0.001}, 0.1, ""), b)).hash()
    assert space.hash() == SearchSpace((parameter_from("a", {**lr, "grid_points": 5}, 0.1, ""), b)).hash()
    others: list[dict[str, Any]] = [
        {**lr, "high": 0.2},
        {"low": 1e-3, "high": 1e-1},
        {"choices": [1e-3, 1e-1]},
    ]
    hashes = {SearchSpace((parameter_from("a", other, 0.1, ""), b)).hash() for other in others}
    assert len(hashes) == 3 and space.hash() not in hashes
    assert SearchSpace((a, parameter_from("b", {"choices": [1, True]}, 1, ""))).hash() != space.hash()
    # The one in every study's name: it must not change from version to version.
    assert SearchSpace((Parameter("optim.lr", "float", 1e-3, 1e-1, log=True),)).hash() == "67d528820274"


def test_what_another_night_found_is_moved_into_the_space_and_said() -> None:
    space = SearchSpace(
        (
            Parameter("a", "float", 0.0, 1.0),
            Parameter("b", "choice", choices=("x", "y")),
            Parameter("c", "int", 1.0, 9.0),
            Parameter("d", "int", 1.0, 9.0),
        )
    )
    fitted, notes = space.fitted({"a": 1.5, "b": "z", "c": 3, "gone": 1})
    assert fitted == {"a": 1.0, "c": 3}
    assert notes == (
        "gone is not searched any more",
        "a = 1.5 is outside of the range, taken as 1.0",
        "b = 'z' is no choice any more",
        "d was not searched then",
    )


def test_a_sample_of_another_space_is_named() -> None:
    space = SearchSpace((Parameter("a", "float", 0.0, 1.0), Parameter("b", "choice", choices=(1, 2))))
    assert space.problem({"a": 0.5, "b": 1}) == ""
    assert "a = 2.0 is outside of 0.0 to 1.0" in space.problem({"a": 2.0, "b": 1})
    assert "b is missing" in space.problem({"a": 0.5})
    assert 'aa is not searched; did you mean "a"' in space.problem({"aa": 0.5, "b": 1})
    assert "b = True" in space.problem({"a": 0.5, "b": True})


def _named(parameter: Parameter, name: str) -> Parameter:
    return Parameter(
        name, parameter.kind, parameter.low, parameter.high, parameter.log, parameter.step, parameter.choices
    )
