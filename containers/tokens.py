"""Who we are to a registry: Basic or Bearer, as it challenges us, with tokens fetched once and renewed in time."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from containers.transfer_errors import AccessDenied, AuthenticationFailed, TransferError

_DEFAULT_LIFE_SECONDS = 60.0
"""Of a token whose issuer does not say how long it lives, by the registries' specification."""
_RENEW_EARLY_SECONDS = 10.0

_PARAMETER = re.compile(r'\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))\s*')


@dataclass(frozen=True)
class Credentials:
    """A user and a secret. Its text shows neither the secret nor its length."""

    user: str
    secret: str
    is_identity_token: bool = False
    """The secret is a refresh token for the issuer of tokens, not a password."""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, secret=…)"


@dataclass(frozen=True)
class Challenge:
    scheme: str
    """In lower case: basic or bearer."""
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class TokenRequest:
    """What is sent to the issuer of tokens."""

    method: str
    url: str
    query: tuple[tuple[str, str], ...]
    form: tuple[tuple[str, str], ...]
    authorization: str | None


FetchToken = Callable[[TokenRequest], Mapping[str, Any]]
"""Send a request to the issuer and return its JSON. Raises AuthenticationFailed where it says 401 or 403."""


def parse_challenges(header: str) -> list[Challenge]:
    """Read a WWW-Authenticate header, which may hold several challenges.

    >>> [one.scheme for one in parse_challenges('Basic realm="a, b", Bearer realm="https://x/token",service="s"')]
    ['basic', 'bearer']
    >>> parse_challenges('Bearer realm="https://x/token",scope="repository:a:pull,push"')[0].parameters["scope"]
    'repository:a:pull,push'
    """
    challenges: list[Challenge] = []
    scheme = ""
    parameters: dict[str, str] = {}
    position = 0
    while position < len(header):
        found = _PARAMETER.match(header, position)
        if found and scheme:
            name, quoted, plain = found.groups()
            parameters[name.lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            position = found.end()
        elif word := re.compile(r"\s*([A-Za-z0-9_-]+)(?=\s|$|,)").match(header, position):
            if scheme:
                challenges.append(Challenge(scheme, parameters))
            scheme, parameters = word.group(1).lower(), {}
            position = word.end()
        else:
            position += 1  # A comma, or what we do not understand.
    if scheme:
        challenges.append(Challenge(scheme, parameters))
    return challenges


def basic(credentials: Credentials) -> str:
    pair = f"{credentials.user}:{credentials.secret}".encode()
    return f"Basic {base64.b64encode(pair).decode('ascii')}"


def token_request(challenge: Challenge, scopes: Sequence[str], credentials: Credentials | None) -> TokenRequest:
    """What to ask the issuer that a Bearer challenge names, for `scopes` beside the one the challenge wants."""
    realm = challenge.parameters.get("realm", "")
    if urlsplit(realm).scheme not in ("http", "https"):
        raise TransferError(f"the registry names {realm!r} as the issuer of its tokens, which is no address")
    service = challenge.parameters.get("service", "")
    wanted = list(dict.fromkeys([*challenge.parameters.get("scope", "").split(), *scopes]))
    fields = [("service", service)] if service else []
    if credentials is not None and credentials.is_identity_token:
        form = [*fields, ("grant_type", "refresh_token"), ("client_id", "roadfuse")]
        form += [("refresh_token", credentials.secret), ("scope", " ".join(wanted))]
        return TokenRequest("POST", realm, (), tuple(form), None)
    query = tuple(fields + [("scope", scope) for scope in wanted])
    return TokenRequest("GET", realm, query, (), basic(credentials) if credentials is not None else None)


class Authorizer:
    """The Authorization header for one repository of one registry, shared by all threads that talk to it."""

    def __init__(
        self,
        registry: str,
        credentials: Credentials | None,
        scopes: Sequence[str],
        fetch: FetchToken,
        registry_is_encrypted: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.credentials = credentials
        self._scopes = tuple(scopes)
        self._fetch = fetch
        self._registry_is_encrypted = registry_is_encrypted
        self._clock = clock
        self._lock = threading.Lock()
        self._challenge: Challenge | None = None
        self._header: str | None = None
        self._expires = float("inf")
        self.num_tokens_fetched = 0

    def header(self) -> str | None:
        """For the next request; a token about to expire is renewed first. None until the registry has challenged."""
        with self._lock:
            if self._challenge is not None and self._clock() >= self._expires:
                self._renew(self._challenge)
            return self._header

    def answer(self, challenge_header: str, refused: str | None) -> None:
        """Take the challenge of a 401 answer to a request that was sent with the header `refused`.

        Raises AuthenticationFailed or AccessDenied where there is nothing better to send.
        """
        with self._lock:
            if self._header != refused:
                return  # Another thread was first.
            challenges = {challenge.scheme: challenge for challenge in parse_challenges(challenge_header)}
            if "bearer" in challenges:
                self._renew(challenges["bearer"])
            elif "basic" in challenges:
                self._answer_basic(refused)
            else:
                raise AccessDenied(
                    f"{self.registry}: wants a way of login that is not supported ({challenge_header[:60]!r}): "
                    "Basic and Bearer are"
                )

    def refused(self, challenge_header: str = "") -> TransferError:
        """What a 401 means although all we have was sent."""
        insufficient = any(
            challenge.parameters.get("error") == "insufficient_scope"
            for challenge in parse_challenges(challenge_header)
        )
        if insufficient and self.credentials is not None:
            return AccessDenied(
                f"{self.registry}: the user {self.credentials.user} is known but may not do this "
                f"({' '.join(self._scopes) or 'no scope'}): ask the owner of the repository for access"
            )
        if self.credentials is None:
            return AccessDenied(
                f"{self.registry}: refuses anonymous access: python -m containers login {self.registry}"
            )
        return AuthenticationFailed(
            f"{self.registry}: refuses the user {self.credentials.user} and its key: make a new key if it expired, "
            f"then python -m containers login {self.registry}"
        )

    def _answer_basic(self, refused: str | None) -> None:
        if self.credentials is None or refused is not None:
            raise self.refused()
        self._header = basic(self.credentials)

    def _renew(self, challenge: Challenge) -> None:
        realm = challenge.parameters.get("realm", "")
        if self.credentials is not None and self._registry_is_encrypted and urlsplit(realm).scheme == "http":
            raise TransferError(f"{self.registry}: wants the key sent to {realm} unencrypted: refused")
        self._challenge = challenge
        self._header = None
        request = token_request(challenge, self._scopes, self.credentials)
        try:
            answer = self._fetch(request)
        except AuthenticationFailed:
            raise self.refused() from None
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token or not re.fullmatch(r"[!-~]+", token):
            raise TransferError(f"{realm}: the issuer of tokens answered without a token")
        self.num_tokens_fetched += 1
        self._header = f"Bearer {token}"
        life = answer.get("expires_in")
        known = isinstance(life, (int, float)) and not isinstance(life, bool) and life > 0
        life_seconds = float(life) if known else _DEFAULT_LIFE_SECONDS  # type: ignore[arg-type]
        # From when it came here: the issuer's clock may differ from ours. A 401 corrects what is wrong in this.
        self._expires = self._clock() + max(life_seconds - _RENEW_EARLY_SECONDS, life_seconds / 2)
