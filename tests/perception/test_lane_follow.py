"""Lanes keep their numbers from frame to frame, tremble less, and are never invented."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from perception.data.sample import Lane, LanePrediction
from perception.lane_follow import FollowedPrediction, LaneFollower

HEIGHT, WIDTH = 320, 800


def lane(bottom_x: float, top_x: float = 400.0, top: float = 130.0) -> Lane:
    y = np.linspace(HEIGHT - 1, top, 40)
    return np.stack([np.interp(y, [top, HEIGHT - 1], [top_x, bottom_x]), y], axis=1)


def follow(follower: LaneFollower, lanes: Sequence[Lane]) -> FollowedPrediction:
    return follower.update(LanePrediction(tuple(lanes), tuple(0.5 for _ in lanes)), HEIGHT, WIDTH)


def test_numbers_stay_whatever_the_order() -> None:
    follower = LaneFollower()
    lanes = {1: lane(100), 2: lane(380), 3: lane(700)}
    assert follow(follower, list(lanes.values())).identities == (1, 2, 3)
    for order in ((3, 1, 2), (2, 3, 1), (2,), (1, 3)):
        assert follow(follower, [lanes[number] for number in order]).identities == order


def test_a_lane_that_is_missed_for_a_while_gets_its_number_back() -> None:
    follower = LaneFollower(most_missed_frames=3)
    a, b = lane(200), lane(600)
    follow(follower, [a, b])
    for _ in range(3):
        # It is not shown meanwhile: the frame does not hold it.
        assert follow(follower, [a]).identities == (1,)
    assert follow(follower, [b, a]).identities == (2, 1)
    for _ in range(4):
        follow(follower, [a])
    # Forgotten: its number is not used again.
    assert follow(follower, [a, b]).identities == (1, 3)


def test_a_change_of_lane_is_followed() -> None:
    """Everything moves by a lane's width over three seconds; one lane leaves, one appears."""
    follower, seen = LaneFollower(), []
    for step in range(90):
        shift = 280 * step / 90
        places = [x - shift for x in (120.0, 400.0, 680.0, 960.0)]
        inside = [x for x in places if 0 <= x < WIDTH]
        numbers = follow(follower, [lane(x) for x in inside]).identities
        seen.append(dict(zip([places.index(x) for x in inside], numbers, strict=True)))
    for place in range(4):
        assert len({frame[place] for frame in seen if place in frame}) == 1
    assert len({number for frame in seen for number in frame.values()}) == 4


def test_lanes_tremble_less_and_stay_where_they_are() -> None:
    random, follower = np.random.default_rng(0), LaneFollower()
    raw, smooth = [], []
    for _ in range(200):
        noisy = lane(300 + random.normal(0, 4))
        (followed,) = follow(follower, [noisy]).lanes
        assert followed.shape == noisy.shape and (followed[:, 1] == noisy[:, 1]).all()
        raw.append(noisy[0, 0])
        smooth.append(followed[0, 0])
    assert np.std(np.diff(smooth)) < 0.6 * np.std(np.diff(raw))
    assert np.mean(smooth) == pytest.approx(300, abs=1)


def test_the_first_frame_and_a_new_lane_are_as_they_were_found() -> None:
    follower = LaneFollower()
    a, b = lane(200), lane(600, top=200.0)
    np.testing.assert_array_equal(follow(follower, [a]).lanes[0], a)
    second = follow(follower, [lane(204), b])
    np.testing.assert_array_equal(second.lanes[1], b)
    assert second.identities == (1, 2) and second.lanes[0][0, 0] == pytest.approx(202, abs=0.01)


def test_an_end_that_grows_is_taken_as_it_is_found() -> None:
    follower = LaneFollower()
    follow(follower, [lane(200, top_x=330, top=200.0)])
    longer = lane(200, top=130.0)
    (followed,) = follow(follower, [longer]).lanes
    assert followed[-1, 1] == 130.0 and np.isfinite(followed).all()
    assert np.abs(followed - longer).max() < 10


def test_frames_without_lanes_and_lanes_of_two_points() -> None:
    follower = LaneFollower()
    assert follow(follower, []).lanes == ()
    short = np.array([[10.0, 300.0], [12.0, 298.0]])
    # Too short to be compared: each time another one.
    assert [follow(follower, [short]).identities for _ in range(2)] == [(1,), (2,)]
    assert follow(follower, []).identities == ()
