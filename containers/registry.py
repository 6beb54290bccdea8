"""A client of one repository of a registry: manifests, blobs and tags over HTTP, with typed errors."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urljoin

import requests

from containers import manifests
from containers.http_failures import Refused, RetryLater, final, may_pass, typed, what_it_says
from containers.retry import Impatient, RetryPolicy, delay_seconds, parse_retry_after, worth_retrying
from containers.tokens import Authorizer, Credentials, TokenRequest
from containers.transfer_errors import (
    AccessDenied,
    AuthenticationFailed,
    CorruptBlob,
    DiskFull,
    Interrupted,
    NotFound,
    ServerFailure,
    TooManyRequests,
    TransferError,
    TransferStopped,
)

_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
_DOCKER_HUB = "docker.io"
_DOCKER_HUB_HOST = "registry-1.docker.io"
_LONGEST_ANSWER_BYTES = 16 << 20
_CHUNK_BYTES = 256 << 10
_LOGINS = 2
"""For one request: the first token may be an old one out of somebody's cache."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Endpoint:
    """A repository at the registry itself or at a mirror of it."""

    registry: str
    """As in an image's name: host, and port if any."""
    repository: str
    plain_http: bool = False

    @property
    def base(self) -> str:
        host = _DOCKER_HUB_HOST if self.registry == _DOCKER_HUB else self.registry
        return f"{'http' if self.plain_http else 'https'}://{host}/v2/"

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}" if self.repository else self.registry


def is_loopback(registry: str) -> bool:
    """Of this very machine, where engines too speak plain HTTP.

    >>> is_loopback("127.0.0.1:5000"), is_loopback("nvcr.io")
    (True, False)
    """
    return _LOOPBACK.fullmatch(registry) is not None


Told = Callable[[str], None]
"""Takes what is worth saying while something is tried again."""


@dataclass(frozen=True)
class BlobAnswer:
    """An open answer to a request for a blob."""

    starts_at: int
    """0 where the registry does not resume."""
    chunks: Iterator[bytes]


class _Authorization(requests.auth.AuthBase):
    """Also keeps requests from taking another key out of a netrc file."""

    def __init__(self, header: str | None) -> None:
        self._header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._header is not None:
            request.headers["Authorization"] = self._header
        return request


class Registry:
    """May be used by several threads at once."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials | None,
        policy: RetryPolicy,
        told: Told,
        actions: str = "pull",
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.endpoint = endpoint
        self._policy = policy
        self._told = told
        self._wait = wait
        self._sessions = threading.local()
        self.given_up = False
        """It failed in a way that the next request would meet again: ask another, if there is one."""
        scopes = [f"repository:{endpoint.repository}:{actions}"] if endpoint.repository else []
        encrypted = not endpoint.plain_http
        self.authorizer = Authorizer(endpoint.registry, credentials, scopes, self._fetch_token, encrypted)

    def check_login(self) -> None:
        """Raise unless the registry takes the credentials."""
        self.retried(lambda: self._read("GET", "", {}))

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Raw bytes and media type of the manifest or index of a tag or digest; a digest is verified."""
        headers = {"Accept": ", ".join(manifests.ACCEPTED)}
        path = f"{self.endpoint.repository}/manifests/{quote(reference, safe=':')}"

        def attempt() -> tuple[bytes, str]:
            body, answer = self._read("GET", path, headers, manifests.LONGEST_MANIFEST_BYTES)
            found = manifests.digest_of(body)
            if manifests.is_digest(reference) and found != reference:
                raise CorruptBlob(
                    f"{self.endpoint}: sent a manifest with digest {found[:19]}… for {reference[:19]}…: it was altered "
                    "at the registry or on the way: do not use this registry or mirror until its owner knows why"
                )
            return body, answer.get("Content-Type", "")

        return self.retried(attempt)

    @contextmanager
    def blob(self, digest: str, offset: int) -> Iterator[BlobAnswer]:
        """One attempt to read a blob from `offset` on; errors are of the types of `transfer_errors`."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        path = f"{self.endpoint.repository}/blobs/{digest}"
        with self._open("GET", path, headers) as answer:
            starts_at = 0
            if answer.status_code == 206:
                starts_at = _range_start(answer.headers.get("Content-Range", ""))
                if starts_at != offset:
                    raise ServerFailure(f"{self.endpoint}: answers a request for bytes {offset}- with others")
            yield BlobAnswer(starts_at, self._chunks(answer))

    def small_blob(self, digest: str) -> bytes:
        """A blob of a few kilobytes, verified, without a cache."""
        path = f"{self.endpoint.repository}/blobs/{digest}"

        def attempt() -> bytes:
            body, _ = self._read("GET", path, {})
            if manifests.digest_of(body) != digest:
                raise CorruptBlob(f"{self.endpoint}: blob {digest[:19]}… arrived altered")
            return body

        return self.retried(attempt)

    def tags(self) -> list[str]:
        """All tags of the repository, page by page."""
        found: list[str] = []
        path = f"{self.endpoint.repository}/tags/list?n=1000"
        seen: set[str] = set()
        while path and path not in seen:
            seen.add(path)
            data, headers = self.retried(lambda path=path: self._read_json("GET", path))  # type: ignore[misc]
            found += [str(tag) for tag in data.get("tags") or []]
            links = requests.utils.parse_header_links(headers.get("Link", ""))
            following = next((link["url"] for link in links if link.get("rel") == "next"), "")
            # Relative to the registry, whatever host the link names: the key goes nowhere else.
            path = following.partition("/v2/")[2] if following else ""
        return found

    def delete_manifest(self, digest: str) -> None:
        """Remove a manifest with all its tags; its blobs go with the registry's own garbage collection."""
        path = f"{self.endpoint.repository}/manifests/{digest}"
        self.retried(lambda: self._read("DELETE", path, {}))

    def retried(self, attempt: Callable[[], Result]) -> Result:
        """Call until it succeeds, fails for good, or the policy's patience ends."""
        failures = 0
        while True:
            try:
                return attempt()
            except TransferError as error:
                failures += 1
                self.pause(error, failures)

    def pause(self, error: TransferError, failures: int) -> None:
        """Wait after a failure that may pass; raise it where it will not, or not soon enough."""
        if not may_pass(error):
            raise error
        attempts = self._policy.corrupt_attempts if isinstance(error, CorruptBlob) else self._policy.attempts
        if failures >= attempts:
            raise final(error, f"{error} (after {failures} attempts)") from None
        asked = getattr(error, "retry_after_seconds", None)
        try:
            seconds = delay_seconds(self._policy, failures, random.random(), asked)
        except Impatient as impatient:
            raise TooManyRequests(f"{error}; it {impatient}: try again later, or log in for a higher limit") from None
        self._told(f"{error}: again in {seconds:.1f} s (attempt {failures} of {attempts} failed)")
        self._wait(seconds)

    def _read_json(self, method: str, path: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        body, headers = self._read(method, path, {})
        try:
            data = json.loads(body)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise ServerFailure(f"{self.endpoint}: answers with something other than JSON")
        return data, headers

    def _read(
        self, method: str, path: str, headers: Mapping[str, str], longest_bytes: int = _LONGEST_ANSWER_BYTES
    ) -> tuple[bytes, Mapping[str, str]]:
        with self._open(method, path, headers) as answer:
            body = bytearray()
            for chunk in self._chunks(answer):
                body += chunk
                if len(body) > longest_bytes:
                    raise ServerFailure(f"{self.endpoint}: its answer is longer than {longest_bytes >> 20} MiB")
            length = answer.headers.get("Content-Length", "")
            if length.isdigit() and len(body) != int(length):
                raise Interrupted(f"{self.endpoint}: the connection was cut after {len(body)} of {length} bytes")
            return bytes(body), answer.headers

    def _chunks(self, answer: requests.Response) -> Iterator[bytes]:
        """The body as it comes, each piece within the watchdog's time."""
        with typed(self.endpoint, self._policy):
            while piece := answer.raw.read1(_CHUNK_BYTES, decode_content=False):
                yield piece

    @contextmanager
    def _open(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[requests.Response]:
        answer = self._send(method, path, headers, self.authorizer.header())
        for _ in range(_LOGINS):
            if answer.status_code != 401:
                break
            sent = answer.request.headers.get("Authorization")
            challenge = answer.headers.get("WWW-Authenticate", "")
            if sent is not None and "insufficient_scope" in challenge:
                break
            answer.close()
            self.authorizer.answer(challenge, str(sent) if sent is not None else None)
            answer = self._send(method, path, headers, self.authorizer.header())
        with answer:
            if answer.status_code == 401:
                raise self.authorizer.refused(answer.headers.get("WWW-Authenticate", ""))
            if answer.status_code >= 300:
                raise self._failure(answer, path)
            yield answer

    def _send(self, method: str, path: str, headers: Mapping[str, str], authorization: str | None) -> requests.Response:
        with typed(self.endpoint, self._policy):
            return self._session().request(
                method,
                urljoin(self.endpoint.base, path),
                # Compressed on the way, a body would not have the bytes its digest is of.
                headers={"Accept-Encoding": "identity", **headers},
                auth=_Authorization(authorization),
                timeout=(self._policy.connect_seconds, self._policy.stall_seconds),
                stream=True,
            )

    def _failure(self, answer: requests.Response, path: str) -> TransferError:
        status, said = answer.status_code, what_it_says(answer)
        asked = "tag" if "/tags/" in path else path or "interface of a registry (/v2/)"
        what = path.partition("/manifests/")[2] or path.partition("/blobs/")[2][:19] or asked
        if status == 429:
            return RetryLater(
                f"{self.endpoint}: too many requests{said}",
                parse_retry_after(answer.headers.get("Retry-After"), time.time()),
            )
        if status == 403:
            return AccessDenied(
                f"{self.endpoint}: access denied{said}: python -m containers login {self.endpoint.registry} "
                "as a user who has access"
            )
        if status == 405 and answer.request.method == "DELETE":
            return AccessDenied(f"{self.endpoint}: does not delete: its owner allows it by storage.delete.enabled")
        if status == 404:
            hint = f"check the name and the tag (python -m containers list --remote {self.endpoint})"
            if self.authorizer.credentials is None:
                # Registries hide what is private from the anonymous.
                hint += f", or python -m containers login {self.endpoint.registry} if it is private"
            return NotFound(f"{self.endpoint}: has no {what}{said}: {hint}")
        if worth_retrying(status):
            return ServerFailure(f"{self.endpoint}: answers {status}{said}")
        return Refused(f"{self.endpoint}: refuses {what} with status {status}{said}")

    def _fetch_token(self, request: TokenRequest) -> Mapping[str, Any]:
        def attempt() -> Mapping[str, Any]:
            issuer = f"{self.endpoint.registry}: the issuer of its tokens"
            with typed(issuer, self._policy):
                answer = self._session().request(
                    request.method,
                    request.url,
                    params=list(request.query),
                    data=list(request.form) or None,
                    auth=_Authorization(request.authorization),
                    timeout=(self._policy.connect_seconds, self._policy.stall_seconds),
                )
            if answer.status_code in (400, 401, 403):
                raise AuthenticationFailed(f"{issuer} refuses")
            if answer.status_code == 429:
                asked = parse_retry_after(answer.headers.get("Retry-After"), time.time())
                raise RetryLater(f"{issuer}: too many requests", asked)
            if answer.status_code >= 300:
                kind = ServerFailure if worth_retrying(answer.status_code) else Refused
                raise kind(f"{issuer} answers {answer.status_code}")
            try:
                data = answer.json()
            except ValueError:
                data = None
            if not isinstance(data, dict):
                raise Refused(f"{issuer} answers with something other than JSON")
            return data

        return self.retried(attempt)

    def _session(self) -> requests.Session:
        session = getattr(self._sessions, "session", None)
        if session is None:
            session = self._sessions.session = requests.Session()
        assert isinstance(session, requests.Session)
        return session


def in_turn(registries: Sequence[Registry], ask: Callable[[Registry], Result], say: Told) -> tuple[Result, Registry]:
    """What the first registry that can gives, and that one. Raises the last one's failure with those before it.

    One that failed is not asked again, unless what it said was that it does not have this.
    """
    failures: list[TransferError] = []
    left = [registry for registry in registries if not registry.given_up] or list(registries[-1:])
    for registry in left:
        try:
            return ask(registry), registry
        except (TransferStopped, DiskFull):
            raise
        except TransferError as error:
            failures.append(error)
            if registry is not left[-1]:
                registry.given_up = registry.given_up or not isinstance(error, NotFound)
                say(f"{error}: trying the next")
    if not failures:
        raise NotFound("there is no registry to ask")
    others = "".join(f"; before that, {error}" for error in failures[:-1])
    raise final(failures[-1], f"{failures[-1]}{others}")


def _range_start(header: str) -> int:
    start = header.strip().removeprefix("bytes").strip().partition("-")[0]
    return int(start) if start.isdigit() else -1


def endpoints(registry: str, repository: str, mirrors: Sequence[str], plain_http: Sequence[str] = ()) -> list[Endpoint]:
    """Where to look, in order: the mirrors (HOST[:PORT][/PREFIX]), then the registry itself."""
    found = []
    for mirror in mirrors:
        host, _, prefix = mirror.strip("/").partition("/")
        path = f"{prefix}/{repository}" if prefix else repository
        found.append(Endpoint(host, path, is_loopback(host) or host in plain_http))
    found.append(Endpoint(registry, repository, is_loopback(registry) or registry in plain_http))
    return found
