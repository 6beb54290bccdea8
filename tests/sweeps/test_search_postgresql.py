"""A search in PostgreSQL, shared by two controllers, over a server of its own."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from perception.errors import UserError
from pipelines.rank_commands import free_port
from sweeps.planning.space import Parameter, SearchSpace
from sweeps.search.search import Search, open_search
from sweeps.search.storage import Storage, choose_storage

pytestmark = pytest.mark.services

SPACE = SearchSpace((Parameter("lr", "float", 1e-4, 1e-1, log=True), Parameter("batch", "choice", choices=(2, 4, 8))))
PASSWORD = "not-to-be-shown"


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a database of a server that lives as long as these tests; it refuses to run as root."""
    programs = _programs()
    if programs is None:
        if os.environ.get("CI") == "true":
            pytest.fail("PostgreSQL is not installed")
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    user = "postgres" if os.geteuid() == 0 else getpass.getuser()
    folder = Path(tempfile.mkdtemp(prefix="sweeps-postgresql-"))
    port = free_port()
    (folder / "password").write_text(PASSWORD)
    account = pwd.getpwnam(user)
    for path in (folder, folder / "password"):
        os.chown(path, account.pw_uid, account.pw_gid)

    def run(*argv: str) -> None:
        options = {"user": user, "group": account.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(argv, capture_output=True, text=True, cwd=folder, timeout=120, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr

    data = str(folder / "data")
    try:
        run(
            f"{programs}/initdb", "-D", data, "-U", "sweeps", "-A", "scram-sha-256",
            "--pwfile", str(folder / "password"), "--no-sync",
        )  # fmt: skip
        settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        run(f"{programs}/pg_ctl", "-D", data, "-w", "-o", settings, "-l", str(folder / "log"), "start")
        try:
            yield f"postgresql://sweeps:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            run(f"{programs}/pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def opened(url: str, study: str, owner: str) -> Iterator[Search]:
    storage = choose_storage("postgresql", "SWEEPS_STORAGE_URL", Path("unused"), {"SWEEPS_STORAGE_URL": url})
    with contextlib.closing(open_search(SPACE, ["maximize"], storage, study, "tpe", owner=owner)) as search:
        yield search


def test_two_controllers_share_a_study_and_each_has_its_own_running_trials(url: str) -> None:
    with opened(url, "shared", "night-one") as one, opened(url, "shared", "night-two") as two:
        asked = [search.ask() for search in (one, two, one, two)]
        assert [suggestion.number for suggestion in asked if suggestion] == [0, 1, 2, 3]
        one.report(0, 1000, 0.25)
        assert one.tell(0, [0.5], "complete", {"seconds": -1.0}) == "complete"
        assert two.tell(1, None, "diverged") == "diverged"
    # After a restart: what is left of each.
    with opened(url, "shared", "night-one") as one, opened(url, "shared", "night-two") as two:
        assert [row.number for row in one.running()] == [2]
        assert [row.number for row in two.running()] == [3]
        assert one.tell(2, [0.75], "complete", {"seconds": 1.0}) == "complete"
        assert two.tell(3, None, "pruned") == "pruned"
        rows, best = two.trials(), two.best()
    assert [row.state for row in rows] == ["complete", "diverged", "complete", "pruned"]
    assert rows[0].curve == {1000: 0.25}
    assert all(SPACE.problem(row.parameters) == "" for row in rows)
    begun = rows[0].started_utc
    assert begun is not None and abs(begun - time.time()) < 600
    assert best is not None and best.number == 0


def test_controllers_that_ask_at_once_get_each_a_trial_of_their_own(url: str) -> None:
    script = (
        "import sys; from tests.sweeps.test_search_postgresql import opened\n"
        "with opened(sys.argv[1], 'parallel', sys.argv[2]) as search:\n"
        "    for place in range(12):\n"
        "        suggestion = search.ask(); search.tell(suggestion.number, [place / 12], 'complete')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, url, f"night-{place}"]) for place in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    with opened(url, "parallel", "another") as search:
        rows = search.trials()
    assert [row.state for row in rows] == ["complete"] * 24
    assert [sum(row.owner == f"night-{place}" for row in rows) for place in range(2)] == [12, 12]


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "grid"])
def test_controllers_that_begin_at_once_try_nothing_twice(url: str, sampler: str) -> None:
    """With one seed and over no trials at all, as two nights of one plan begin."""
    levels = tuple(range(16))
    space = (
        SearchSpace(tuple(Parameter(name, "choice", choices=levels) for name in ("a", "b")))
        if sampler == "grid"
        else SPACE
    )
    storage = choose_storage("postgresql", "SWEEPS_STORAGE_URL", Path("unused"), {"SWEEPS_STORAGE_URL": url})
    seen: dict[str, list[str]] = {"one": [], "two": []}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        searches = {
            owner: stack.enter_context(
                contextlib.closing(
                    open_search(space, ["maximize"], storage, f"at-once-{sampler}", sampler, owner=owner)
                )
            )
            for owner in seen
        }

        def ask(owner: str) -> None:
            for _ in range(8):
                suggestion = searches[owner].ask()
                assert suggestion is not None
                seen[owner].append(json.dumps(suggestion.parameters))

        list(pool.map(ask, seen))
    assert len({*seen["one"], *seen["two"]}) == 16, seen


def test_controllers_that_begin_at_once_over_an_empty_database_all_begin(url: str, tmp_path: Path) -> None:
    with psycopg.connect(url, autocommit=True) as server:
        server.execute("CREATE DATABASE empty")
    empty = f"{url.rpartition('/')[0]}/empty"
    # All are ready before any begins: importing takes longer than making the tables.
    script = (
        "import sys, time; from pathlib import Path; from tests.sweeps.test_search_postgresql import opened\n"
        "folder = Path(sys.argv[2]); (folder / sys.argv[3]).touch()\n"
        "while not (folder / 'go').exists(): time.sleep(0.001)\n"
        "with opened(sys.argv[1], sys.argv[3], 'night') as search: assert search.trials() == []"
    )
    names = [f"study-{place}" for place in range(4)]
    processes = [subprocess.Popen([sys.executable, "-c", script, empty, str(tmp_path), name]) for name in names]
    while not all((tmp_path / name).exists() for name in names):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    (tmp_path / "go").touch()
    assert [process.wait(timeout=300) for process in processes] == [0] * 4


def test_a_wrong_password_is_one_line_that_does_not_show_it(url: str) -> None:
    wrong = url.replace(PASSWORD, "a-wrong-one")
    with pytest.raises(UserError, match="the search's database cannot be used") as caught, opened(wrong, "shared", "n"):
        pass
    assert "a-wrong-one" not in str(caught.value) and "\n" not in str(caught.value)
    assert PASSWORD not in repr(Storage(url=url))
