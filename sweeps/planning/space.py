"""Search spaces: which dotted names of a configuration are searched, and over which values. No Optuna here.

A sample is a mapping from dotted name to value, exactly as `--set` takes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from perception.errors import UserError, nearest

Value = bool | int | float | str | tuple[Any, ...]
Sample = dict[str, Value]
Kind = Literal["float", "int", "choice"]

MOST_GRID_POINTS = 100_000
SAMPLERS = ("tpe", "gp", "cmaes", "qmc", "random", "grid")


@dataclass(frozen=True)
class Parameter:
    """One dotted name and the values that it may take: a range, or choices."""

    name: str
    kind: Kind
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """Sampled evenly in its logarithm."""
    step: float = 0.0
    """Values are low + k * step; 0: any."""
    choices: tuple[Value, ...] = ()
    grid_points: int = 0
    """Of a range without a step: so many values make its grid."""

    def contains(self, value: Any) -> bool:
        """Whether the value is one of this parameter's; 3.0 is none of a range of whole numbers."""
        if self.kind == "choice":
            return any(_same(value, choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, (int, float) if self.kind == "float" else int):
            return False
        if not self.low <= value <= self.high:
            return False
        if not self.step:
            return True
        turns = (value - self.low) / self.step
        return abs(turns - round(turns)) < 1e-6

    def at(self, position: float) -> Value:
        """The value at a place from 0 to 1 of the range, or of the list of choices."""
        position = min(1.0, max(0.0, position))
        if self.kind == "choice":
            return self.choices[min(len(self.choices) - 1, int(position * len(self.choices)))]
        if self.step:
            turns = min(self._num_steps, int(position * (self._num_steps + 1)))
            return self._typed(float(Decimal(repr(self.low)) + turns * Decimal(repr(self.step))))
        # Whole numbers get equal shares, the ends too.
        margin = 0.5 if self.kind == "int" else 0.0
        if self.log:
            low, high = math.log(self.low - margin), math.log(self.high + margin)
            value = math.exp(low + position * (high - low))
        else:
            value = self.low - margin + position * (self.high - self.low + 2 * margin)
        return self._typed(min(self.high, max(self.low, value)))

    def position(self, value: Any) -> float:
        """From 0 to 1, in the middle of what `at` turns into this value."""
        if self.kind == "choice":
            index = next(index for index, choice in enumerate(self.choices) if _same(value, choice))
            return (index + 0.5) / len(self.choices)
        number = float(value)
        if self.step:
            return (round((number - self.low) / self.step) + 0.5) / (self._num_steps + 1)
        margin = 0.5 if self.kind == "int" else 0.0
        low, high = self.low - margin, self.high + margin
        if self.log:
            return (math.log(number) - math.log(low)) / (math.log(high) - math.log(low))
        return (number - low) / (high - low)

    def nearest_to(self, value: Any) -> Value | None:
        """The allowed value that is nearest; None where there is none to speak of (another choice)."""
        if self.contains(value):
            return value  # type: ignore[no-any-return]
        if self.kind == "choice" or isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        inside = min(self.high, max(self.low, float(value)))
        if self.step:
            turns = min(self._num_steps, round((inside - self.low) / self.step))
            inside = float(Decimal(repr(self.low)) + turns * Decimal(repr(self.step)))
        return self._typed(inside)

    def grid(self) -> tuple[Value, ...]:
        """All values, or `grid_points` of a range that has no steps. Raises UserError where neither is given."""
        if self.kind == "choice":
            return self.choices
        if self.step or (self.kind == "int" and not self.grid_points):
            step = Decimal(repr(self.step)) if self.step else Decimal(1)
            count = int((Decimal(repr(self.high)) - Decimal(repr(self.low))) / step) + 1
            return tuple(self._typed(float(Decimal(repr(self.low)) + turn * step)) for turn in range(count))
        if self.grid_points < 1:
            raise UserError(
                f"{self.name}: the grid sampler needs the values of this range: give step, choices or grid_points"
            )
        if self.grid_points == 1:
            return (self.at(0.5),)
        # Ends included; whole numbers that fall together are one point.
        span = range(self.grid_points)
        values = [self._between(index / (self.grid_points - 1)) for index in span]
        return tuple(dict.fromkeys(values))

    def _between(self, share: float) -> Value:
        if share in (0.0, 1.0):
            return self._typed(self.high if share else self.low)
        if self.log:
            return self._typed(math.exp(math.log(self.low) * (1 - share) + math.log(self.high) * share))
        return self._typed(self.low + share * (self.high - self.low))

    @property
    def _num_steps(self) -> int:
        return round((self.high - self.low) / self.step)

    def _typed(self, value: float) -> Value:
        return round(value) if self.kind == "int" else float(value)


@dataclass(frozen=True)
class SearchSpace:
    """Parameters in a fixed order, that of their names."""

    parameters: tuple[Parameter, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    def hash(self) -> str:
        """Twelve hex digits that change with any name, range, step or choice, and with nothing else.

        The order in which parameters are written, and how numbers are (1e-3 or .001), play no part; nor does
        `grid_points`, since it does not change which values are allowed.
        """
        rows = [
            [p.name, p.kind, p.low, p.high, p.log, p.step, [json.dumps(choice) for choice in p.choices]]
            for p in sorted(self.parameters, key=lambda parameter: parameter.name)
        ]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()[:12]

    def problem(self, sample: Mapping[str, Any]) -> str:
        """One line about what of the sample is not of this space; empty if it is a whole sample of it."""
        for name in sample:
            if name not in self.names:
                return f"{name} is not searched{nearest(name, self.names)}"
        for parameter in self.parameters:
            if parameter.name not in sample:
                return f"{parameter.name} is missing"
            if not parameter.contains(sample[parameter.name]):
                return f"{parameter.name} = {sample[parameter.name]!r} is outside of {describe(parameter)}"
        return ""

    def fitted(self, sample: Mapping[str, Any]) -> tuple[Sample, tuple[str, ...]]:
        """What of the sample this space knows, moved into it, and what had to be changed, a line each.

        For what an earlier night found in another space. A name that is missing in the outcome is left to the sampler.
        """
        fitted: Sample = {}
        notes = [f"{name} is not searched any more" for name in sample if name not in self.names]
        for parameter in self.parameters:
            if parameter.name not in sample:
                notes.append(f"{parameter.name} was not searched then")
                continue
            value = sample[parameter.name]
            found = parameter.nearest_to(value)
            if found is None:
                notes.append(f"{parameter.name} = {value!r} is no choice any more")
                continue
            if not _same(found, value):
                notes.append(f"{parameter.name} = {value!r} is outside of the range, taken as {found!r}")
            fitted[parameter.name] = found
        return fitted, tuple(notes)

    def draw(self, generator: random.Random) -> Sample:
        """A random sample, each parameter by itself."""
        return {parameter.name: parameter.at(generator.random()) for parameter in self.parameters}

    def num_grid_points(self) -> int:
        return math.prod(len(parameter.grid()) for parameter in self.parameters)

    def grid(self) -> list[Sample]:
        """Every combination exactly once, in the order of the names. Raises UserError for more than 100,000."""
        count = self.num_grid_points()
        if count > MOST_GRID_POINTS:
            raise UserError(f"the grid has {count:,} points, more than {MOST_GRID_POINTS:,}: take fewer values")
        columns = [parameter.grid() for parameter in self.parameters]
        return [dict(zip(self.names, row, strict=True)) for row in itertools.product(*columns)]


def assignments(sample: Mapping[str, Any]) -> list[str]:
    """What `--set` takes, exact to the last bit: `name=JSON`, in the order of the names."""
    return [f"{name}={json.dumps(value)}" for name, value in sorted(sample.items())]


def sample_of(texts: Sequence[str]) -> Sample:
    """The inverse of `assignments`."""
    pairs = [text.split("=", 1) for text in texts]
    return {name: as_value(json.loads(text)) for name, text in pairs}


def as_value(value: Any) -> Value:
    """Lists of JSON or TOML as tuples, so that values can be compared and be keys."""
    return tuple(as_value(item) for item in value) if isinstance(value, (list, tuple)) else value


def key(sample: Mapping[str, Any]) -> str:
    """Equal for equal samples, in whatever order and from whatever file they come."""
    return json.dumps({name: sample[name] for name in sorted(sample)}, separators=(",", ":"))


def describe(parameter: Parameter) -> str:
    """For people: `0.0001 to 0.01, log` or `[1, 2, 4]`."""
    if parameter.kind == "choice":
        return json.dumps(list(parameter.choices))
    low, high = parameter._typed(parameter.low), parameter._typed(parameter.high)
    step = f", step {parameter._typed(parameter.step)}" if parameter.step else ""
    return f"{low} to {high}{', log' if parameter.log else ''}{step}"


def parameter_from(name: str, table: Mapping[str, Any], default: Any, where: str) -> Parameter:
    """A parameter as a plan states it; `default` is the value of the model's own configuration, whose type it takes.

    Raises UserError with `where`, which names file and table.
    """
    allowed = ("low", "high", "log", "step", "choices", "grid_points")
    for field in table:
        if field not in allowed:
            raise UserError(f"{where}: field {field} is unknown{nearest(field, allowed)}")
    if "choices" in table:
        if len(table) > 1:
            raise UserError(f"{where}: give either choices or a range (low, high), not both")
        return _choice(name, table["choices"], default, where)
    if "low" not in table or "high" not in table:
        raise UserError(f"{where}: give low and high, or choices")
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        raise UserError(f"{where}: {name} is no number (it is {json.dumps(default)}): give choices")
    kind: Kind = "float" if isinstance(default, float) else "int"
    numbers = {field: table.get(field, 0) for field in ("low", "high", "step")}
    for field, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float) if kind == "float" else int):
            raise UserError(f"{where}: {field} = {number!r} must be {'a' if kind == 'float' else 'a whole'} number")
        if not math.isfinite(number):
            raise UserError(f"{where}: {field} = {number!r} must be finite")
    log = table.get("log", False)
    points = table.get("grid_points", 0)
    if not isinstance(log, bool):
        raise UserError(f"{where}: log = {log!r} must be true or false")
    if isinstance(points, bool) or not isinstance(points, int) or points < 0:
        raise UserError(f"{where}: grid_points = {points!r} must be a whole number, not negative")
    low, high, step = numbers["low"], numbers["high"], numbers["step"]
    if low >= high:
        raise UserError(f"{where}: low = {low!r} must be below high = {high!r}; to fix a value, put it under overrides")
    if log and low <= 0:
        raise UserError(f"{where}: low = {low!r} must be above 0 where log = true")
    if log and step:
        raise UserError(f"{where}: log and step exclude each other: leave one out, or list the values as choices")
    if step < 0 or ("step" in table and step == 0):
        raise UserError(f"{where}: step = {step!r} must be above 0")
    if step:
        _check_step(low, high, step, kind, where)
    return Parameter(name, kind, float(low), float(high), log, float(step), (), points)


def check_sampler(sampler: str, space: SearchSpace, num_objectives: int, where: str) -> None:
    """Raise UserError, beginning with `where`, if the sampler is unknown or cannot search such a space."""
    if sampler not in SAMPLERS:
        raise UserError(f'{where} = "{sampler}" is unknown{nearest(sampler, SAMPLERS)}')
    choices = [parameter.name for parameter in space.parameters if parameter.kind == "choice"]
    if sampler == "cmaes" and choices:
        raise UserError(f"{where}: cmaes searches numbers only, {choices[0]} has choices: take tpe")
    if sampler == "cmaes" and 0 < len(space.parameters) < 2:
        raise UserError(f"{where}: cmaes needs at least two parameters: take tpe")
    if sampler == "cmaes" and num_objectives > 1:
        raise UserError(f"{where}: cmaes takes one objective only: take tpe or gp")
    if sampler == "grid":
        try:
            space.grid()
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _choice(name: str, choices: Any, default: Any, where: str) -> Parameter:
    if not isinstance(choices, (list, tuple)) or len(choices) < 2:
        raise UserError(f"{where}: choices must be a list of at least 2 values; to fix a value, put it under overrides")
    values = []
    for choice in choices:
        # As the field's own type has it: 1 and 1.0 are one configuration, not two.
        whole = isinstance(default, float) and isinstance(choice, int) and not isinstance(choice, bool)
        values.append(float(choice) if whole else as_value(choice))
    if len({json.dumps(value) for value in values}) < len(values):
        raise UserError(f"{where}: a value stands twice among the choices")
    return Parameter(name, "choice", choices=tuple(values))


def _check_step(low: float, high: float, step: float, kind: Kind, where: str) -> None:
    """Refuse a range that its step does not divide, instead of quietly searching a smaller one."""
    exact_low, exact_high, exact_step = (Decimal(repr(number)) for number in (low, high, step))
    turns = (exact_high - exact_low) / exact_step
    if turns == turns.to_integral_value():
        return
    below = exact_low + int(turns) * exact_step
    above = below + exact_step
    # The nearer one, but never a range of a single value.
    fitting = below if exact_high - below <= above - exact_high and below > exact_low else above
    text = str(int(fitting)) if kind == "int" else repr(float(fitting))
    raise UserError(f"{where}: high = {high!r} is not low + a multiple of step = {step!r}; the nearest one is {text}")


def _same(one: Any, other: Any) -> bool:
    """Equal in value and in kind: True is not 1; a list is its tuple."""
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in (one, other)):
        return json.dumps(one) == json.dumps(other)
    return bool(one == other)
