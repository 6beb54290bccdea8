"""What HTTP and its library can fail of, as our errors; and which of them may pass if one waits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import requests
import urllib3

from containers.retry import RetryPolicy
from containers.transfer_errors import (
    CorruptBlob,
    Interrupted,
    ServerFailure,
    Stalled,
    TooManyRequests,
    TransferError,
    Unreachable,
)


class Refused(ServerFailure):
    """A failure of the registry's that another attempt would meet again."""


class RetryLater(TooManyRequests):
    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def may_pass(error: TransferError) -> bool:
    """Whether the same request may succeed if it is made again."""
    passing = (Unreachable, Interrupted, Stalled, ServerFailure, RetryLater, CorruptBlob)
    return isinstance(error, passing) and not isinstance(error, Refused) and not error.tried_to_the_end


@contextmanager
def typed(where: object, policy: RetryPolicy) -> Iterator[None]:
    """Turn what the HTTP library raises into our errors."""
    try:
        yield
    except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
        if isinstance(error, (requests.ConnectTimeout, urllib3.exceptions.ConnectTimeoutError)):
            raise Unreachable(f"{where}: no connection within {policy.connect_seconds:.0f} s") from None
        raise Stalled(f"{where}: no byte for {policy.stall_seconds:.0f} s") from None
    except requests.exceptions.SSLError as error:
        raise Refused(f"{where}: TLS failed ({_innermost(error)}): check the certificates and the clock") from None
    except (requests.ConnectionError, urllib3.exceptions.NewConnectionError) as error:
        # A connection that was made and closed without an answer is one of these too.
        kind = Interrupted if "Connection aborted" in str(error) or "reset" in str(error) else Unreachable
        if kind is Interrupted:
            raise Interrupted(f"{where}: connection cut") from None
        raise Unreachable(f"{where}: {_innermost(error)}: is its name right, and does it run?") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise Interrupted(f"{where}: connection cut ({type(error).__name__})") from None


def _innermost(error: BaseException) -> str:
    """The plain reason at the bottom of the library's chain of exceptions."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or next(
            (argument for argument in reversed(seen.args) if isinstance(argument, BaseException)), None
        )
        if not isinstance(inner, BaseException) or inner is seen:
            break
        seen = inner
    text = str(getattr(seen, "strerror", None) or seen)
    # Before the reason, the library shows the connection object it happened to, and what it tried.
    text = re.sub(r"^<?(?:urllib3\.\S*)?HTTPS?Connection\b.*?\)?>?: ", "", text)
    return re.sub(r"^Failed to establish a new connection: (?:\[Errno -?\d+\] )?", "", text)


def what_it_says(answer: requests.Response) -> str:
    """The registry's own words, in brackets and shortened."""
    try:
        body = answer.raw.read(4096, decode_content=False)
        errors = json.loads(body).get("errors") or [{}]
        said = " ".join(str(errors[0].get(name) or "") for name in ("code", "message")).strip()
    except (ValueError, AttributeError, TypeError, KeyError, OSError, urllib3.exceptions.HTTPError):
        said = ""
    printable = "".join(letter if letter.isprintable() else " " for letter in said)[:120]
    return f" ({printable})" if printable else ""


def final(error: TransferError, message: str) -> TransferError:
    """The same failure with more to say, which nobody tries again."""
    public = next(kind for kind in type(error).__mro__ if kind not in (Refused, RetryLater))
    assert issubclass(public, TransferError)
    made = public(message)
    made.tried_to_the_end = True
    return made
