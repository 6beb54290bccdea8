"""Population-based training: who takes over from whom, with which parameters and whose checkpoint."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.planning.plan import Population
from sweeps.planning.space import Parameter, SearchSpace, key
from sweeps.search.population import Finished, first_generation, next_generation, num_generations, perturbed

RULES = Population(size=8, samples_per_generation=1000, replaced_share=0.25)
SPACE = SearchSpace(
    (
        Parameter("batch", "choice", choices=(2, 4, 8)),
        Parameter("lr", "float", 1e-4, 1e-1, log=True),
        Parameter("offset", "float", -1.0, 1.0),
        Parameter("probability", "float", 0.0, 0.8, step=0.1),
        Parameter("warmup", "int", 100.0, 1000.0),
    )
)


def finished(member: int, value: float | None, generation: int = 0) -> Finished:
    sample = SPACE.draw(random.Random(member))
    return Finished(member, generation, sample, value, f"/runs/m{member}g{generation}")


def test_the_first_generation_holds_what_is_known_and_draws_the_others() -> None:
    known = [SPACE.draw(random.Random(99))]
    begun = first_generation(RULES, SPACE, seed=1, known=known)
    assert [one.member for one in begun] == list(range(8))
    assert begun[0].parameters == known[0]
    assert len({key(one.parameters) for one in begun}) == 8
    assert all(SPACE.problem(one.parameters) == "" and one.initial_checkpoint == "" for one in begun)
    assert begun == first_generation(RULES, SPACE, seed=1, known=known)
    assert begun[1:] != first_generation(RULES, SPACE, seed=2, known=known)[1:]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=8, max_size=8, unique=True), st.integers(0, 5))
def test_the_worst_quarter_takes_over_from_the_best_quarter(values: list[float], seed: int) -> None:
    everyone = [finished(member, value) for member, value in enumerate(values)]
    ranked = sorted(everyone, key=lambda one: -(one.value or 0.0))
    for one in everyone:
        following = next_generation(RULES, SPACE, "maximize", seed, one, everyone)
        assert following.member == one.member and following.generation == 1
        assert SPACE.problem(following.parameters) == ""
        if one in ranked[-2:]:
            assert following.parent in {ranked[0].member, ranked[1].member}
            assert following.initial_checkpoint == everyone[following.parent].run_folder
        else:
            assert following.parent == one.member
            assert following.initial_checkpoint == one.run_folder
            assert following.parameters == one.parameters


def test_where_less_is_better_the_largest_is_replaced() -> None:
    everyone = [finished(member, float(member)) for member in range(8)]
    assert next_generation(RULES, SPACE, "minimize", 0, everyone[7], everyone).parent in (0, 1)
    assert next_generation(RULES, SPACE, "minimize", 0, everyone[0], everyone).parent == 0


def test_nobody_waits_for_the_others_and_other_generations_do_not_count() -> None:
    alone = finished(3, 0.1, generation=1)
    before = [finished(member, 0.9, generation=0) for member in range(8)]
    following = next_generation(RULES, SPACE, "maximize", 0, alone, before)
    assert (following.parent, following.generation) == (3, 2)
    assert following.cause == "goes on, place 1 of 1"


def test_a_member_that_failed_takes_over_from_the_best_or_begins_anew() -> None:
    failed = finished(0, None)
    following = next_generation(RULES, SPACE, "maximize", 0, failed, [failed, finished(1, 0.5)])
    assert following.parent == 1 and following.initial_checkpoint == "/runs/m1g0"
    following = next_generation(RULES, SPACE, "maximize", 0, failed, [failed, finished(1, None)])
    assert following.initial_checkpoint == "" and following.cause == "begins anew"
    assert SPACE.problem(following.parameters) == ""


def test_equal_members_take_over_nothing() -> None:
    everyone = [finished(member, 0.5) for member in range(8)]
    for one in everyone:
        assert next_generation(RULES, SPACE, "maximize", 0, one, everyone).parent == one.member


def test_the_same_question_has_the_same_answer_after_a_restart() -> None:
    everyone = [finished(member, float(member)) for member in range(8)]
    first = next_generation(RULES, SPACE, "maximize", 5, everyone[0], everyone)
    assert first == next_generation(RULES, SPACE, "maximize", 5, everyone[0], reversed(everyone))


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_perturbed_parameters_stay_in_the_space_and_move(seed: int) -> None:
    generator = random.Random(seed)
    sample = SPACE.draw(generator)
    for _ in range(5):
        moved = perturbed(SPACE, sample, generator)
        assert SPACE.problem(moved) == ""
        assert key(moved) != key(sample)
        sample = moved


def test_a_rest_shorter_than_a_generation_is_left_out() -> None:
    assert num_generations(RULES, 3999) == 3
