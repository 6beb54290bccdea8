"""The registry client: what is asked for, what its failures are called, and how long it is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from containers import transfer_errors
from containers.http_failures import may_pass
from containers.manifests import ACCEPTED, Platform, choose, parse, platform_of_machine
from containers.registry import Endpoint, Registry, endpoints, is_loopback
from containers.retry import Impatient, RetryPolicy, delay_seconds, parse_retry_after
from tests.containers.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.containers.pulling import FAST, noise
from tests.containers.registry_double import RegistryDouble, make_image, make_index, registry_double
from tests.containers.token_issuer import token_issuer


@pytest.fixture
def server() -> Iterator[RegistryDouble]:
    with registry_double() as state:
        yield state


@pytest.fixture
def proxy(server: RegistryDouble) -> Iterator[FaultProxy]:
    with fault_proxy(server.address) as state:
        yield state


def client(address: str, policy: RetryPolicy = FAST) -> Registry:
    return Registry(Endpoint(address, "a/b", plain_http=True), None, policy, lambda line: None)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 50), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, 100))
def test_delays_grow_to_a_limit_and_are_never_shorter_than_asked(
    failures: int, jitter: float, asked: float | None
) -> None:
    policy = RetryPolicy()
    seconds = delay_seconds(policy, failures, jitter, asked)
    if asked is None:
        assert policy.first_delay_seconds / 2 <= seconds <= policy.longest_delay_seconds
    else:
        assert asked <= seconds <= asked + policy.first_delay_seconds


def test_a_registry_that_is_restarted_is_found_again_whatever_the_draw() -> None:
    policy = RetryPolicy()
    assert sum(delay_seconds(policy, failures, 0.0) for failures in range(1, policy.attempts)) > 15


def test_more_patience_than_allowed_is_not_had() -> None:
    with pytest.raises(Impatient):
        delay_seconds(RetryPolicy(), 1, 0.0, RetryPolicy().longest_retry_after_seconds + 1)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40))
def test_any_retry_after_is_survived(text: str) -> None:
    seconds = parse_retry_after(text, 1e9)
    assert seconds is None or seconds >= 0


def test_all_types_of_manifests_are_asked_for(server: RegistryDouble) -> None:
    image = make_image([b"x"])
    server.add("a/b", "1", image)
    raw, media_type = client(server.address).manifest("1")
    assert raw == image.manifest and media_type
    _, _, headers = server.requests[-1]
    assert headers["Accept"].split(", ") == list(ACCEPTED)
    assert headers["Accept-Encoding"] == "identity"


def test_tags_are_read_page_by_page(server: RegistryDouble) -> None:
    image = make_image([b"x"])
    tags = [f"26.{month:02d}-py3" for month in range(1, 13)]
    for tag in tags:
        server.add("a/b", tag, image)
    server.page_size = 5
    assert client(server.address).tags() == tags
    assert len([path for _, path, _ in server.requests if "tags" in path]) == 3


def test_a_repository_that_is_not_there_and_what_is_no_registry_are_named(proxy: FaultProxy) -> None:
    proxy.faults.append(Fault("/v2/", "status", status=404))
    with pytest.raises(transfer_errors.NotFound, match=rf"has no tag: .*list --remote {proxy.address}/a/b\)"):
        client(proxy.address).tags()
    nothing = Registry(Endpoint(proxy.address, "", plain_http=True), None, FAST, lambda line: None)
    with pytest.raises(transfer_errors.NotFound, match="has no interface of a registry"):
        nothing.check_login()


def test_a_manifest_longer_than_any_is_given_up(server: RegistryDouble) -> None:
    server.manifests["a/b", "1"] = b'{"mediaType": "x", "annotations": "' + b"x" * (5 << 20) + b'"}'
    with pytest.raises(transfer_errors.ServerFailure, match="longer than 4 MiB"):
        client(server.address, replace(FAST, attempts=1)).manifest("1")


def test_another_part_than_asked_for_is_no_answer(server: RegistryDouble, proxy: FaultProxy) -> None:
    data = noise(1, 1000)
    server.blobs["sha256:" + "0" * 64] = data
    proxy.faults.append(Fault("/blobs/", "replace", body=data))
    with client(proxy.address).blob("sha256:" + "0" * 64, 500) as answer:
        # It ignored the range, which is allowed and seen.
        assert answer.starts_at == 0


def test_the_key_does_not_follow_a_link_to_another_host(server: RegistryDouble, proxy: FaultProxy) -> None:
    """A registry that lists its tags page by page could name another host for the next page."""
    server.add("a/b", "1", make_image([b"x"]))
    link = {"Link": '<http://127.0.0.1:1/v2/a/b/tags/list?last=1>; rel="next"'}
    proxy.faults.append(Fault("tags", "status", times=1, status=200, headers=link, body=b'{"tags": ["0"]}'))
    assert client(proxy.address).tags() == ["0"]


@pytest.mark.parametrize(
    ("status", "kind", "requests"),
    [
        (400, transfer_errors.ServerFailure, 1),
        (403, transfer_errors.AccessDenied, 1),
        (404, transfer_errors.NotFound, 1),
        (500, transfer_errors.ServerFailure, 3),
        (502, transfer_errors.ServerFailure, 3),
        (429, transfer_errors.TooManyRequests, 3),
    ],
)
def test_each_status_has_its_error_and_its_patience(
    proxy: FaultProxy, status: int, kind: type[transfer_errors.TransferError], requests: int
) -> None:
    body = b'{"errors":[{"code":"ODD","message":"a reason\\n\\u001b[31m"}]}'
    fault = Fault("manifests", "status", status=status, body=body)
    proxy.faults.append(fault)
    with pytest.raises(kind, match="a reason") as caught:
        client(proxy.address).manifest("1")
    assert fault.num_done == requests
    assert isinstance(caught.value, kind)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("status", [429, 500, 400])
def test_what_was_retried_to_the_end_is_not_retried_again(proxy: FaultProxy, status: int) -> None:
    proxy.faults.append(Fault("manifests", "status", status=status))
    with pytest.raises(transfer_errors.TransferError) as caught:
        client(proxy.address).manifest("1")
    assert not may_pass(caught.value)


def test_an_issuer_that_fails_is_asked_as_often_as_the_policy_says_and_no_more(server: RegistryDouble) -> None:
    with token_issuer() as issuer, fault_proxy(issuer.address) as front:
        issuer.address = front.address
        server.issuer = issuer
        fault = Fault("proxy_auth", "status", status=500)
        front.faults.append(fault)
        with pytest.raises(transfer_errors.ServerFailure, match="the issuer of its tokens answers 500"):
            client(server.address).manifest("1")
        assert fault.num_done == FAST.attempts


def test_deletion_that_is_not_allowed_is_named(proxy: FaultProxy) -> None:
    proxy.faults.append(Fault("manifests", "status", status=405))
    with pytest.raises(transfer_errors.AccessDenied, match=r"storage\.delete\.enabled"):
        client(proxy.address).delete_manifest("sha256:" + "0" * 64)


def test_endpoints_are_mirrors_then_the_registry() -> None:
    found = endpoints("nvcr.io", "nvidia/pytorch", ["mirror.local:5000/ngc/", "127.0.0.1:5001"], ["mirror.local:5000"])
    assert [endpoint.base for endpoint in found] == [
        "http://mirror.local:5000/v2/",
        "http://127.0.0.1:5001/v2/",
        "https://nvcr.io/v2/",
    ]
    assert [endpoint.repository for endpoint in found] == ["ngc/nvidia/pytorch", "nvidia/pytorch", "nvidia/pytorch"]
    assert Endpoint("docker.io", "library/debian").base == "https://registry-1.docker.io/v2/"
    for ours in ("localhost:5000", "127.0.0.1", "127.1.2.3:80", "[::1]:5000"):
        assert is_loopback(ours)
    for foreign in ("localhost.example", "127.example.org", "127.0.0.1.example", "10.0.0.1", "nvcr.io"):
        assert not is_loopback(foreign)


def test_a_netrc_file_does_not_override_us(
    server: RegistryDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login other password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    server.add("a/b", "1", make_image([b"x"]))
    client(server.address).manifest("1")
    assert "Authorization" not in server.requests[-1][2]


def test_of_variants_the_asked_one_is_taken() -> None:
    index = parse(make_index({"linux/amd64": make_image([b"a"]), "linux/arm64": make_image([b"b"])}), "", "x")
    assert choose(index, platform_of_machine("aarch64"), "x").platform == Platform("linux", "arm64")  # type: ignore[arg-type]
