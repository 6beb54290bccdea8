"""The caller's account in a container: first, whole, and no other of the image's lost."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from containers.errors import ContainerError
from containers.streams import Relay, WholeCharacters
from containers.user_mapping import User, account_archive, group_with, parse_user, passwd_with, user_name

IMAGE_PASSWD = """root:x:0:0:root:/root:/bin/bash
ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
"""
IMAGE_GROUP = "root:x:0:\nubuntu:x:1000:\nvideo:x:44:\n"
ANNA = User(1000, 1000, "anna", (44, 3000))


def _by_number(passwd: str, number: int) -> list[str]:
    return [row.split(":")[0] for row in passwd.splitlines() if int(row.split(":")[2]) == number]


def test_the_caller_comes_first_and_nobody_else_is_lost() -> None:
    passwd = passwd_with(IMAGE_PASSWD, ANNA)
    assert passwd.splitlines()[0] == "anna:x:1000:1000:anna:/home/anna:/bin/sh"
    assert _by_number(passwd, 1000) == ["anna", "ubuntu"]
    assert IMAGE_PASSWD in passwd


def test_another_of_the_same_name_gives_way() -> None:
    passwd = passwd_with("anna:x:10001:10001::/home/old:/bin/sh\n", ANNA)
    assert [row for row in passwd.splitlines() if row.startswith("anna:")] == [
        "anna:x:1000:1000:anna:/home/anna:/bin/sh"
    ]


def test_root_is_there_once() -> None:
    passwd = passwd_with(IMAGE_PASSWD, User(0, 0, "root"))
    assert _by_number(passwd, 0) == ["root"] and ":/root:" in passwd.splitlines()[0]
    assert group_with(IMAGE_GROUP, User(0, 0, "root")).count("root:x:0:") == 1


def test_groups_that_the_image_does_not_know_get_names() -> None:
    group = group_with(IMAGE_GROUP, ANNA)
    assert group.splitlines()[:2] == ["anna:x:1000:", "group-3000:x:3000:anna"]
    assert group.count(":44:") == 1


@given(uid=st.integers(0, 2**32 - 2), gid=st.integers(0, 2**32 - 2), known=st.one_of(st.none(), st.text()))
def test_every_number_gets_one_whole_line(uid: int, gid: int, known: str | None) -> None:
    user = User(uid, gid, user_name(uid, known))
    first = passwd_with(IMAGE_PASSWD, user).splitlines()[0].split(":")
    assert len(first) == 7 and first[2:4] == [str(uid), str(gid)]
    assert (first[0] == "root") == (uid == 0)
    assert "/" not in user.name and user.environment()["HOME"] == first[5]


def test_the_home_is_the_users_own() -> None:
    with tarfile.open(fileobj=io.BytesIO(account_archive("p\n", "g\n", ANNA))) as archive:
        entries = {entry.name: entry for entry in archive}
    assert list(entries) == ["etc/passwd", "etc/group", "home/anna", "home/anna/.cache"]
    assert entries["etc/passwd"].mode == 0o644 and entries["etc/passwd"].uid == 0
    assert (entries["home/anna"].uid, entries["home/anna"].gid, entries["home/anna"].mode) == (1000, 1000, 0o700)


def test_users_by_number() -> None:
    assert parse_user("4242") == (4242, None)
    assert parse_user("4242:7") == (4242, 7)
    for text in ("anna", "-1", "1:", "4294967295", "1:2:3"):
        with pytest.raises(ContainerError, match="give numbers"):
            parse_user(text)


# Output


@given(text=st.text(), cuts=st.lists(st.integers(1, 5)))
def test_characters_are_whole_and_no_byte_is_lost_or_late(text: str, cuts: list[int]) -> None:
    data, whole, came = text.encode(), WholeCharacters(), b""
    while data:
        size = cuts.pop() if cuts else len(data)
        part = whole.feed(data[:size])
        part.decode()  # No character is cut.
        came += part
        data = data[size:]
    assert came == text.encode() and whole.end() == b""


@given(st.lists(st.binary()))
def test_what_is_no_text_passes_as_it_is(chunks: list[bytes]) -> None:
    whole = WholeCharacters()
    assert b"".join(whole.feed(chunk) for chunk in chunks) + whole.end() == b"".join(chunks)


@given(st.binary(min_size=1))
def test_at_most_an_unfinished_character_is_held(data: bytes) -> None:
    whole = WholeCharacters()
    assert len(data) - len(whole.feed(data)) <= 3


class Counted(io.BytesIO):
    num_flushes = 0

    def flush(self) -> None:
        self.num_flushes += 1
        super().flush()


def test_a_bar_that_never_ends_its_line_shows_at_once() -> None:
    out, errors = Counted(), Counted()
    relay = Relay(out, errors)
    for number in range(3):
        relay.write(f"\r{number} of 3 █".encode(), None)
        assert out.num_flushes == number + 1
    assert out.getvalue().decode().endswith("\r2 of 3 █") and not errors.getvalue()


def test_a_reader_who_left_ends_nothing_and_what_he_missed_is_counted() -> None:
    out, errors = io.BytesIO(), io.BytesIO()
    out.close()
    relay = Relay(out, errors)
    relay.write(b"12345", b"heard")
    relay.write(b"678", None)
    assert relay.num_dropped_bytes == 8 and errors.getvalue() == b"heard"
