"""The search for better parameters, by ask and tell over Optuna, which only this file and storage.py import.

One controller asks and tells; training jobs know nothing of it. What ends trials early is decided in pruning.py.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from perception.errors import UserError
from sweeps.planning.space import Parameter, Sample, SearchSpace, check_sampler, key
from sweeps.search.search_rows import Importance, Outcome, State, Suggestion, TrialRow
from sweeps.search.storage import Storage, open_storage

MOST_TRIALS_FOR_IMPORTANCE = 2000
LEAST_TRIALS_FOR_IMPORTANCE = 10
NUM_STARTUP_TRIALS = 10
"""Drawn at random before a model of the objective is made."""

_STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class Search:
    """One study; made by `open_search`."""

    def __init__(
        self,
        study: optuna.Study,
        backend: optuna.storages.BaseStorage,
        space: SearchSpace,
        sampler: str,
        seed: int,
        owner: str,
        exclusive: bool,
        constraints: Sequence[str],
        sync: Callable[[], None],
    ):
        """`sync`: forces to the disk what was written; done before anybody is told of it."""
        self._study = study
        self._backend = backend
        self._space = space
        self._distributions = {parameter.name: _distribution(parameter) for parameter in space.parameters}
        self._owner = owner
        self._exclusive = exclusive
        self._constraints = frozenset(constraints)
        self._sync = sync
        self._asked: dict[int, optuna.Trial] = {}
        self._grid: list[Sample] | None = None
        if sampler == "grid":
            self._grid = space.grid()
            random.Random(seed).shuffle(self._grid)
        self.repairs: tuple[str, ...] = ()
        """What had to be mended when the search was opened, a line each, to be said."""

    @property
    def name(self) -> str:
        return self._study.study_name

    def ask(self) -> Suggestion | None:
        """The next trial: one that was enqueued, or the sampler's. None: the grid has been tried as a whole."""
        with self._alone():
            if self._grid is not None and not self._has_waiting() and not self._enqueue_of_grid():
                return None
            trial = self._study.ask(self._distributions)
        self._asked[trial.number] = trial
        if self._owner:
            trial.set_user_attr("owner", self._owner)
        self._sync()
        return Suggestion(trial.number, self._sample(trial.params), trial.user_attrs.get("note", ""))

    def report(self, number: int, num_samples: int, value: float) -> None:
        """Note the first objective on the way, after so many samples; nothing is kept of a value that is not finite.

        Said again it changes nothing. Raises ValueError where the trial is not running.
        """
        trial = self._trial(number)
        known = num_samples in self._frozen(number).intermediate_values
        if len(self._study.directions) == 1 and math.isfinite(value) and not known:
            trial.report(value, num_samples)
            self._sync()

    def tell(
        self,
        number: int,
        values: Sequence[float] | None,
        outcome: Outcome,
        excesses: Mapping[str, float] | None = None,
    ) -> Outcome:
        """End a trial, and return as what: values that are not finite make a complete trial a diverged one, and a
        constraint of which nothing is known makes it a failed one.

        Told twice in the same way it stays as it is, so that a controller that was killed may say it again; another
        answer to a trial that has ended raises ValueError. `values` are read for complete trials only.
        """
        if outcome == "complete":
            if values is None or len(values) != len(self._study.directions):
                given = "none" if values is None else len(values)
                raise ValueError(f"trial {number}: {len(self._study.directions)} values are needed, {given} given")
            known = {name for name, excess in (excesses or {}).items() if math.isfinite(excess)}
            outcome = "complete" if self._constraints <= known else "failed"
            outcome = outcome if all(map(math.isfinite, values)) else "diverged"
        frozen = self._frozen(number)
        if frozen.state.is_finished():
            same_values = outcome != "complete" or tuple(frozen.values or ()) == tuple(map(float, values or ()))
            if _state(frozen) == outcome and same_values:
                return outcome
            raise ValueError(f"trial {number} has ended already, as {_state(frozen)}: it cannot end as {outcome}")
        trial = self._trial(number)
        for name, excess in (excesses or {}).items():
            # Killed in between, the constraint may be there already.
            if math.isfinite(excess) and name not in frozen.constraints:
                trial.set_constraint(name, excess)
        if outcome == "diverged":
            trial.set_user_attr("outcome", "diverged")
        if outcome == "complete":
            self._study.tell(number, [float(value) for value in values or ()], TrialState.COMPLETE)
        else:
            # What diverged counts as ended early, not as failed: samplers that learn keep away from its place.
            self._study.tell(number, state=TrialState.FAIL if outcome == "failed" else TrialState.PRUNED)
        self._asked.pop(number, None)
        self._sync()
        return outcome

    def enqueue(self, parameters: Mapping[str, Any], note: str = "") -> bool:
        """Have these tried next; names left out are the sampler's. False: already there under the same note.

        Raises UserError for a value outside of the space (`SearchSpace.fitted` moves it inside).
        """
        whole = {**{p.name: p.at(0.5) for p in self._space.parameters}, **parameters}
        problem = self._space.problem(whole)
        if problem:
            raise UserError(f"search {self.name}: {problem}")
        if self._grid is not None and len(parameters) < len(self._space.parameters):
            raise UserError(f"search {self.name}: a grid takes whole points only")
        fixed = {name: self._stored(name, value) for name, value in parameters.items()}
        text = key(fixed)
        for trial in self._trials():
            if trial.user_attrs.get("enqueued") == text and trial.user_attrs.get("note", "") == note:
                return False
        self._study.enqueue_trial(fixed, user_attrs={"enqueued": text, "note": note})
        self._sync()
        return True

    def learn(
        self,
        parameters: Mapping[str, Any],
        values: Sequence[float],
        note: str,
        excesses: Mapping[str, float] | None = None,
    ) -> None:
        """Add a complete trial that is known from the record, e.g. of a past night, without running it."""
        problem = self._space.problem(parameters)
        if problem:
            raise UserError(f"search {self.name}: {problem}")
        self._study.add_trial(
            optuna.trial.create_trial(
                params={name: self._stored(name, value) for name, value in parameters.items()},
                distributions=self._distributions,
                values=[float(value) for value in values],
                user_attrs={"note": note, "owner": self._owner},
                constraints=dict(excesses or {}),
            )
        )
        self._sync()

    def running(self) -> list[TrialRow]:
        """Trials of this owner that were asked and not told: after a restart, those to be adopted or told."""
        rows = [self._row(trial) for trial in self._trials((TrialState.RUNNING,))]
        # Killed between the values and the owner's name: of nobody else where nobody else writes.
        return [row for row in rows if row.owner == self._owner or (self._exclusive and not row.owner)]

    def trials(self) -> list[TrialRow]:
        return [self._row(trial) for trial in self._trials()]

    def best(self) -> TrialRow | None:
        """The complete trial that is best in the first objective and breaks no constraint."""
        sign = 1 if self._study.directions[0] == optuna.study.StudyDirection.MINIMIZE else -1
        rows = [row for row in self.trials() if row.state == "complete" and row.feasible and row.values]
        return min(rows, key=lambda row: (sign * row.values[0], row.number), default=None)  # type: ignore[index]

    def front(self) -> list[TrialRow]:
        """Complete trials that break no constraint and that no other is at least as good as in every objective."""
        signs = [1 if d == optuna.study.StudyDirection.MINIMIZE else -1 for d in self._study.directions]
        rows = [row for row in self.trials() if row.state == "complete" and row.feasible and row.values]
        losses = [tuple(sign * value for sign, value in zip(signs, row.values or (), strict=True)) for row in rows]
        return [row for row, loss in zip(rows, losses, strict=True) if not any(_beats(o, loss) for o in losses)]

    def importance(self) -> Importance:
        """For the first objective. Of more than 2,000 complete trials the newest are read."""
        complete = self._trials((TrialState.COMPLETE,))[-MOST_TRIALS_FOR_IMPORTANCE:]
        complete = [trial for trial in complete if set(trial.params) == set(self._space.names)]
        if len(complete) < LEAST_TRIALS_FOR_IMPORTANCE:
            reason = f"{len(complete)} complete trials, {LEAST_TRIALS_FOR_IMPORTANCE} are needed"
            return Importance({}, len(complete), reason)
        values = [trial.values[0] for trial in complete]
        if len(set(values)) == 1:
            return Importance({}, len(complete), "all trials have the same value")
        direction = self._study.directions[0]
        copy = optuna.create_study(direction=direction)
        copy.add_trials(
            optuna.trial.create_trial(params=t.params, distributions=t.distributions, value=t.values[0])
            for t in complete
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(copy, evaluator=evaluator)
        return Importance({name: float(share) for name, share in shares.items()}, len(complete))

    def close(self) -> None:
        """Give back the connections to a database; of a journal nothing is open."""
        if isinstance(self._backend, optuna.storages.RDBStorage):
            self._backend.remove_session()
            self._backend.engine.dispose()

    # What follows is between our values and Optuna's.

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other controller asks this study meanwhile: two would take the same point of a grid or a sequence."""
        if not isinstance(self._backend, optuna.storages.RDBStorage):
            yield
            return
        from sqlalchemy import text

        with self._backend.engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:study))"), {"study": self.name})
            yield

    def _trials(self, states: Iterable[TrialState] | None = None) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=tuple(states) if states else None)

    def _frozen(self, number: int) -> FrozenTrial:
        trials = self._trials()
        if not 0 <= number < len(trials):
            raise ValueError(f"trial {number} is unknown to study {self.name}")
        return trials[number]

    def _trial(self, number: int) -> optuna.Trial:
        """Of one that is running, also where an earlier process asked for it."""
        if number not in self._asked:
            frozen = self._frozen(number)
            if frozen.state != TrialState.RUNNING:
                raise ValueError(f"trial {number} is not running but {_state(frozen)}")
            self._asked[number] = optuna.Trial(self._study, frozen._trial_id)
        return self._asked[number]

    def _has_waiting(self) -> bool:
        return bool(self._trials((TrialState.WAITING,)))

    def _enqueue_of_grid(self) -> bool:
        assert self._grid is not None
        tried = {key(self._sample(trial.params)) for trial in self._trials()}
        point = next((point for point in self._grid if key(point) not in tried), None)
        return point is not None and self.enqueue(point, note="")

    def _stored(self, name: str, value: Any) -> Any:
        parameter = next(parameter for parameter in self._space.parameters if parameter.name == name)
        return json.dumps(value) if parameter.kind == "choice" else parameter.nearest_to(value)

    def _sample(self, stored: Mapping[str, Any]) -> Sample:
        """In the order of the space, exact: Optuna's steps may end in ...0004."""
        sample: Sample = {}
        for parameter in self._space.parameters:
            if parameter.name not in stored:
                continue
            value = stored[parameter.name]
            if parameter.kind == "choice":
                sample[parameter.name] = next(c for c in parameter.choices if json.dumps(c) == value)
            else:
                found = parameter.nearest_to(value)
                assert found is not None
                sample[parameter.name] = found
        return sample

    def _row(self, trial: FrozenTrial) -> TrialRow:
        return TrialRow(
            number=trial.number,
            parameters=self._sample(trial.params),
            state=_state(trial),
            values=tuple(trial.values) if trial.values and trial.state == TrialState.COMPLETE else None,
            curve=dict(sorted(trial.intermediate_values.items())),
            excesses=dict(trial.constraints),
            owner=trial.user_attrs.get("owner", ""),
            note=trial.user_attrs.get("note", ""),
            started_utc=_utc(trial.datetime_start),
            ended_utc=_utc(trial.datetime_complete),
        )


def open_search(
    space: SearchSpace,
    directions: Sequence[Literal["maximize", "minimize"]],
    storage: Storage,
    study: str,
    sampler: str = "tpe",
    seed: int = 0,
    owner: str = "",
    constraints: Sequence[str] = (),
) -> Search:
    """Open a study, or begin it. `owner`: the night; where several share a study, each sees its own running trials,
    and draws numbers of its own.
    `constraints`: names of those that each complete trial is told with.

    Raises UserError for a damaged or unreachable storage, a sampler that cannot search this space, or a study of that
    name with other objectives.
    """
    check_sampler(sampler, space, len(directions), "sampler")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend, sync, repairs = open_storage(storage)
    opened = optuna.create_study(storage=backend, study_name=study, directions=list(directions), load_if_exists=True)
    if [direction.name.lower() for direction in opened.directions] != list(directions):
        raise UserError(f"search {study}: was begun with other objectives; give the plan another name")
    # Begun again, a search must not draw the same numbers again; nor must two that begin at once.
    drawn_by = f"{seed}/{len(opened.get_trials(deepcopy=False))}" + (f"/{owner}" if storage.shared else "")
    opened.sampler = _sampler(sampler, seed, random.Random(drawn_by).getrandbits(31))
    search = Search(opened, backend, space, sampler, seed, owner, not storage.shared, constraints, sync)
    search.repairs = (*repairs, *_end_unnamed(opened, space, storage))
    return search


def _sampler(name: str, seed: int, fresh_seed: int) -> BaseSampler:
    if name == "tpe":
        # constant_liar: trials that run count as bad ones, so that parallel suggestions spread.
        return optuna.samplers.TPESampler(seed=fresh_seed, n_startup_trials=NUM_STARTUP_TRIALS, constant_liar=True)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=fresh_seed, n_startup_trials=NUM_STARTUP_TRIALS)
    if name == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=fresh_seed, warn_independent_sampling=False)
    if name == "qmc":
        with warnings.catch_warnings():
            # That its interface may change is for whoever updates Optuna, not for whoever reads a night's output.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # Its place in the sequence is in the storage; another seed would be another sequence.
            return optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
    return optuna.samplers.RandomSampler(seed=fresh_seed)


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.kind == "choice":
        # As JSON text: Optuna stores no lists.
        return CategoricalDistribution([json.dumps(choice) for choice in parameter.choices])
    if parameter.kind == "int":
        low, high = round(parameter.low), round(parameter.high)
        return IntDistribution(low, high, log=parameter.log, step=round(parameter.step) or 1)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step or None)


def _end_unnamed(study: optuna.Study, space: SearchSpace, storage: Storage) -> list[str]:
    """End trials whose values were never all stored: their controller was killed while it asked.

    Only where this controller is the study's only one: another might be asking just now.
    """
    if storage.shared:
        return []
    lines = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if set(trial.params) != set(space.names):
            study.tell(trial.number, state=TrialState.FAIL)
            lines.append(
                f"search {study.study_name}: trial {trial.number} was begun without its values; ended as failed"
            )
    return lines


def _state(trial: FrozenTrial) -> State:
    return "diverged" if trial.user_attrs.get("outcome") == "diverged" else _STATES[trial.state]


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _utc(time: datetime.datetime | None) -> float | None:
    """Seconds since the epoch; Optuna gives local time that does not say so."""
    return time.timestamp() if time is not None else None
