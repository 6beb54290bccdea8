"""References of images: what is read is what is written, and what names no single image is refused with a cure."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from containers.errors import ContainerError
from containers.names import (
    ImageReference,
    Release,
    is_short_name,
    our_reference,
    parse_our_reference,
    parse_reference,
    parse_release,
)

DIGEST = "sha256:" + "0123456789abcdef" * 4

registries = st.sampled_from(["nvcr.io", "127.0.0.1:5000", "localhost", "registry.example.org:443"])
components = st.from_regex(r"[a-z0-9]{1,8}([._-][a-z0-9]{1,5}){0,2}", fullmatch=True)
organisations = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,5}){0,2}", fullmatch=True).filter(
    lambda name: name != "localhost"
)
releases = st.builds(
    Release, st.integers(0, 99), st.integers(1, 12), st.sampled_from(["", "cpu", "cuda13", "jetson-orin"])
)


@given(
    registry=st.one_of(st.just(""), registries),
    organisation=organisations,
    rest=st.lists(components, min_size=1, max_size=2),
    release=releases,
    digest=st.sampled_from(["", DIGEST]),
)
def test_what_is_written_is_read_back(
    registry: str, organisation: str, rest: list[str], release: Release, digest: str
) -> None:
    reference = ImageReference(registry, "/".join([organisation, *rest]), str(release), digest)
    assert parse_reference(str(reference)) == reference
    assert parse_our_reference(str(reference)) == reference
    assert parse_release(reference.tag) == release


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("nvcr.io/nvidia/pytorch:26.07-py3", "nvcr.io", "nvidia/pytorch", "26.07-py3", ""),
        ("127.0.0.1:5000/roadfuse/lane:26.11-cpu-py3", "127.0.0.1:5000", "roadfuse/lane", "26.11-cpu-py3", ""),
        ("nvcr.io/org/team/lane:26.11-py3", "nvcr.io", "org/team/lane", "26.11-py3", ""),
        ("debian:bookworm", "", "debian", "bookworm", ""),
        ("localhost/lane@" + DIGEST, "localhost", "lane", "", DIGEST),
        ("nvcr.io/a/b:1.2@" + DIGEST, "nvcr.io", "a/b", "1.2", DIGEST),
        ("org/name:5000", "", "org/name", "5000", ""),
    ],
)
def test_parts_of_a_reference(text: str, registry: str, repository: str, tag: str, digest: str) -> None:
    assert parse_reference(text) == ImageReference(registry, repository, tag, digest)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("a b:1", "has blanks"),
        ("nvcr.io/nvidia/pytorch", "has no tag and no digest"),
        ("nvcr.io/nvidia/pytorch:latest", '"latest" names another image every day'),
        ("nvcr.io/nvidia/pytorch:", 'tag ""'),
        ("nvcr.io/Nvidia/pytorch:1", '"Nvidia" cannot be part of a name'),
        ("nvcr.io//pytorch:1", '"" cannot be part of a name'),
        ("nvcr.io:port/pytorch:1", "is not a registry"),
        ("a/b:1@sha256:12", "64 hexadecimal digits"),
        ("a/b:1@" + DIGEST.upper(), "64 hexadecimal digits"),
        ("a/b:" + "x" * 129, "at most 128"),
    ],
)
def test_what_names_no_single_image(text: str, said: str) -> None:
    with pytest.raises(ContainerError, match=re.escape(said)) as caught:
        parse_reference(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lane:26.11-py3", "has no ORG"),
        ("nvcr.io/a/b/c/lane:26.11-py3", "has no ORG"),
        ("nvcr.io/org/lane:26.13-py3", "is not YY.MM"),
        ("nvcr.io/org/lane:2026.11-py3", "is not YY.MM"),
        ("nvcr.io/org/lane:26.11", "is not YY.MM"),
        ("nvcr.io/org/lane@" + DIGEST, "has no tag"),
    ],
)
def test_what_is_no_image_of_ours(text: str, said: str) -> None:
    with pytest.raises(ContainerError, match=re.escape(said)):
        parse_our_reference(text)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", "roadfuse/lane:26.11-cpu-py3"),
        ("127.0.0.1:5000", "127.0.0.1:5000/roadfuse/lane:26.11-cpu-py3"),
        ("nvcr.io/org/team", "nvcr.io/org/team/lane:26.11-cpu-py3"),
        ("myteam", "myteam/lane:26.11-cpu-py3"),
    ],
)
def test_our_names_under_a_prefix(prefix: str, expected: str) -> None:
    assert str(our_reference(prefix, "lane", Release(26, 11, "cpu"))) == expected


def test_an_unknown_image_gets_a_hint() -> None:
    with pytest.raises(ContainerError, match='did you mean "lane"'):
        our_reference("", "lan", Release(26, 11))


def test_forms_for_engines() -> None:
    reference = parse_reference(f"nvcr.io/org/lane:26.11-py3@{DIGEST}")
    assert reference.tagged == "nvcr.io/org/lane:26.11-py3"
    assert reference.pinned == f"nvcr.io/org/lane@{DIGEST}"
    assert reference.name == "lane"
    assert is_short_name("lane") and not is_short_name(reference.tagged) and not is_short_name("lane:26.11-py3")
