"""Challenges, tokens and who gets which secret."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from containers.tokens import Authorizer, Challenge, Credentials, TokenRequest, parse_challenges, token_request
from containers.transfer_errors import AccessDenied, AuthenticationFailed, TransferError

KEY = "nvapi-SECRET"
USER = Credentials("$oauthtoken", KEY)
CHALLENGE = 'Bearer realm="https://issuer/token",service="s",scope="repository:a/b:pull"'


class Issuer:
    """Answers with token after token."""

    def __init__(self, life_seconds: float | None = 300, refuses: bool = False) -> None:
        self.requests: list[TokenRequest] = []
        self.life_seconds = life_seconds
        self.refuses = refuses

    def __call__(self, request: TokenRequest) -> Mapping[str, Any]:
        self.requests.append(request)
        if self.refuses:
            raise AuthenticationFailed("no")
        answer = {"token": f"token-{len(self.requests)}"}
        return answer if self.life_seconds is None else {**answer, "expires_in": self.life_seconds}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def authorizer(issuer: Issuer, credentials: Credentials | None = USER, encrypted: bool = True) -> Authorizer:
    return Authorizer("nvcr.io", credentials, ["repository:a/b:pull"], issuer, encrypted, Clock())


_NAMES = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
_VALUES = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)))


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(_NAMES, _VALUES, max_size=4))
def test_whatever_is_quoted_is_read_back(parameters: dict[str, str]) -> None:
    escaped = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in parameters.items()}
    header = "Bearer " + ",".join(f'{name}="{value}"' for name, value in escaped.items())
    assert parse_challenges(header) == [Challenge("bearer", parameters)]


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60))
def test_any_header_is_survived(header: str) -> None:
    parse_challenges(header)


def test_a_token_is_asked_for_in_ngcs_manner() -> None:
    request = token_request(parse_challenges(CHALLENGE)[0], ["repository:a/b:pull"], USER)
    assert (request.method, request.url) == ("GET", "https://issuer/token")
    assert request.query == (("service", "s"), ("scope", "repository:a/b:pull"))
    assert request.authorization is not None and request.authorization.startswith("Basic ")
    assert token_request(parse_challenges(CHALLENGE)[0], [], None).authorization is None


def test_an_identity_token_is_posted_and_never_in_the_address() -> None:
    credentials = Credentials("<token>", KEY, is_identity_token=True)
    request = token_request(parse_challenges(CHALLENGE)[0], [], credentials)
    assert request.method == "POST" and request.authorization is None
    assert ("refresh_token", KEY) in request.form and KEY not in str((request.url, request.query))


def test_before_a_challenge_nothing_is_sent() -> None:
    assert authorizer(Issuer()).header() is None


def test_many_threads_refused_at_once_fetch_one_token() -> None:
    issuer = Issuer()
    one = authorizer(issuer)
    threads = [threading.Thread(target=one.answer, args=(CHALLENGE, None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(issuer.requests) == 1
    assert one.header() == "Bearer token-1"


@pytest.mark.parametrize(("life", "renewed_at"), [(300, 290), (None, 50), (8, 4)])
def test_a_token_is_renewed_before_it_expires(life: float | None, renewed_at: float) -> None:
    issuer = Issuer(life)
    one = authorizer(issuer)
    clock: Clock = one._clock  # type: ignore[assignment]
    one.answer(CHALLENGE, None)
    clock.now = renewed_at - 0.1
    assert one.header() == "Bearer token-1"
    clock.now = renewed_at
    assert one.header() == "Bearer token-2"


def test_a_refused_token_is_replaced() -> None:
    issuer = Issuer()
    one = authorizer(issuer)
    one.answer(CHALLENGE, None)
    one.answer(CHALLENGE, "Bearer token-1")
    assert one.header() == "Bearer token-2"


def test_basic_is_answered_once() -> None:
    one = authorizer(Issuer())
    one.answer('Basic realm="x"', None)
    header = one.header()
    assert header is not None and header.startswith("Basic ")
    with pytest.raises(AuthenticationFailed, match=r"user \$oauthtoken and its key"):
        one.answer('Basic realm="x"', header)


def test_refusals_say_what_to_do_and_never_the_key() -> None:
    cases: list[tuple[Credentials | None, type[TransferError]]] = [(USER, AuthenticationFailed), (None, AccessDenied)]
    for credentials, kind in cases:
        with pytest.raises(kind, match="python -m containers login") as caught:
            authorizer(Issuer(refuses=True), credentials).answer(CHALLENGE, None)
        assert KEY not in str(caught.value)
    denied = authorizer(Issuer()).refused(CHALLENGE + ',error="insufficient_scope"')
    assert isinstance(denied, AccessDenied) and "may not do this" in str(denied)


def test_a_key_is_not_sent_unencrypted_to_where_an_encrypted_registry_points() -> None:
    issuer = Issuer()
    with pytest.raises(TransferError, match="unencrypted: refused"):
        authorizer(issuer).answer(CHALLENGE.replace("https", "http"), None)
    assert not issuer.requests
    authorizer(issuer, encrypted=False).answer(CHALLENGE.replace("https", "http"), None)
    authorizer(issuer, credentials=None).answer(CHALLENGE.replace("https", "http"), None)
    assert len(issuer.requests) == 2


def test_an_issuer_that_is_no_address_and_a_token_that_is_none_are_named() -> None:
    with pytest.raises(TransferError, match="no address"):
        authorizer(Issuer()).answer('Bearer realm="file:///etc/passwd"', None)

    def odd(request: TokenRequest) -> Mapping[str, Any]:
        return {"token": "two\r\nlines"}

    with pytest.raises(TransferError, match="without a token"):
        Authorizer("nvcr.io", None, [], odd, True).answer(CHALLENGE, None)


def test_an_unknown_way_of_login_is_named() -> None:
    with pytest.raises(AccessDenied, match="Negotiate"):
        authorizer(Issuer()).answer("Negotiate", None)


def test_credentials_do_not_show_their_secret() -> None:
    assert KEY not in repr(USER) and KEY not in str(USER)
