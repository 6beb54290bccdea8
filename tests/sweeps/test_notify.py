"""Notification: who is told, and that no secret and no failure of a service gets out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.night.notify import notify
from sweeps.planning.plan import Notify

SECRET = "json://user:hunter2@localhost/x"


def test_each_variable_is_told_and_named_never_its_url(tmp_path: Path) -> None:
    sent: list[tuple[str, str, str]] = []

    def send(url: str, title: str, text: str) -> bool:
        sent.append((url, title, text))
        return len(sent) == 1

    settings = Notify(("A_URL", "B_URL", "C_URL"))
    lines = notify(
        settings, "demo, night x", "all well", False, {"A_URL": SECRET, "B_URL": SECRET}, tmp_path / "told", send
    )
    assert [url for url, _, _ in sent] == [SECRET] * 2 and sent[0][1:] == ("demo, night x", "all well")
    assert lines[0] == "notification by A_URL: sent" and lines[1] == "notification by B_URL: not delivered"
    assert "C_URL is not set" in lines[2] and "hunter2" not in "".join(lines)


@pytest.mark.parametrize(("has_problems", "num_sent"), [(False, 0), (True, 1)])
def test_only_problems_where_the_plan_says_so(has_problems: bool, num_sent: int, tmp_path: Path) -> None:
    sent = []
    settings = Notify(("A_URL",), only_problems=True)
    told = tmp_path / "told"
    notify(settings, "t", "x", has_problems, {"A_URL": SECRET}, told, lambda *words: not sent.append(words))  # type: ignore[func-returns-value]
    assert len(sent) == num_sent


def test_a_report_made_anew_tells_only_whom_it_did_not_reach(tmp_path: Path) -> None:
    sent: list[str] = []

    def send(url: str, title: str, text: str) -> bool:
        sent.append(url)
        return url == "a"

    settings, urls = Notify(("A_URL", "B_URL")), {"A_URL": "a", "B_URL": "b"}
    notify(settings, "t", "x", False, urls, tmp_path / "told", send)
    lines = notify(settings, "t", "x", False, urls, tmp_path / "told", send)
    assert sent == ["a", "b", "b"]
    assert lines == ["notification by A_URL: was sent already", "notification by B_URL: not delivered"]
    # A disk without room for the note ends nothing.
    assert notify(settings, "t", "x", False, urls, tmp_path / "none" / "told", send)[0].endswith("A_URL: sent")


def test_a_service_that_fails_ends_nothing_and_tells_no_secret(tmp_path: Path) -> None:
    def send(url: str, title: str, text: str) -> bool:
        raise ConnectionError(f"cannot reach {url}")

    lines = notify(Notify(("A_URL",)), "t", "x", True, {"A_URL": SECRET}, tmp_path / "told", send)
    assert lines == ["notification by A_URL failed (ConnectionError)"]


def test_nobody_is_told_where_nobody_is_named(tmp_path: Path) -> None:
    assert notify(Notify(), "t", "x", True, {}, tmp_path / "told") == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_apprise_itself_delivers_to_a_server_of_ones_own(tmp_path: Path) -> None:
    """To an HTTP server of this test, as a JSON notification."""
    import http.server
    import json
    import threading

    received: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"json://127.0.0.1:{server.server_port}/"
            settings = Notify(("A_URL",))
            lines = notify(settings, "demo, night x", "lane is better", False, {"A_URL": url}, tmp_path / "told")
        finally:
            server.shutdown()
            thread.join()
    assert lines == ["notification by A_URL: sent"]
    assert (received[0]["title"], received[0]["message"]) == ("demo, night x", "lane is better")
