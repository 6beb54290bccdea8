"""Tests that need a service say what is missing, and fail where it must be there."""

from __future__ import annotations

import pytest

from tests.containers import daemons
from tests.containers.conftest import needs


def test_without_an_engine_tests_skip_with_the_reason_and_in_ci_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "PATH", "/absent")
    said = r"needs dockerd, .*: apt-get install docker\.io, as root"
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=said):
        needs(daemons.ENGINE_PROGRAMS, "docker.io")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=said):
        needs(daemons.ENGINE_PROGRAMS, "docker.io")


def test_whoever_is_not_root_lacks_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert daemons.missing(["sh"]) == ["root"]
