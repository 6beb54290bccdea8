"""What can go wrong between a registry, the cache and the engine: one type a cause, one line with the cure."""

from __future__ import annotations

from containers.errors import ContainerError


class TransferError(ContainerError):
    """A pull or a push did not get through; what arrived stays in the cache."""

    tried_to_the_end = False
    """All patience there is was spent on it."""


class Unreachable(TransferError):
    """No connection to the registry, or to the issuer of its tokens."""


class Interrupted(TransferError):
    """Connections were made and broke, too often."""


class Stalled(TransferError):
    """No byte came for too long, too often."""


class CorruptBlob(TransferError):
    """The bytes of a blob or a manifest do not have the digest they were asked by."""


class TooManyRequests(TransferError):
    """The registry's limit was reached, for longer than we wait."""


class ServerFailure(TransferError):
    """The registry answered with a failure of its own, too often."""


class NotFound(TransferError):
    """The registry knows no such repository, tag or digest."""


class AuthenticationFailed(TransferError):
    """The user and key were refused."""


class AccessDenied(TransferError):
    """This user, or an anonymous one, may not do this."""


class DiskFull(TransferError):
    """No room for what is pulled."""


class LockMismatch(ContainerError):
    """The registry, the engine or a bundle has something else than the lock file says."""


class TransferStopped(TransferError):
    """Ended because something else failed or the user asked."""
