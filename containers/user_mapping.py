"""Whoever calls is the same person inside: number, name, home. Files for a container that is not started yet. Pure."""

from __future__ import annotations

import io
import re
import tarfile
from dataclasses import dataclass

from containers.errors import ContainerError

_NAME = re.compile(r"[a-z_][a-z0-9_.-]{0,30}")


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    name: str
    groups: tuple[int, ...] = ()
    """Supplementary ones, for folders that a group shares."""

    @property
    def home(self) -> str:
        return "/root" if self.uid == 0 else f"/home/{self.name}"

    def environment(self) -> dict[str, str]:
        """Caches go to the home, which is writable; torch's compiler would put them where the number is a name."""
        return {
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "XDG_CACHE_HOME": f"{self.home}/.cache",
            "TORCHINDUCTOR_CACHE_DIR": f"{self.home}/.cache/torchinductor",
            "TRITON_CACHE_DIR": f"{self.home}/.cache/triton",
        }


def user_name(uid: int, known: str | None) -> str:
    """`known` is what the host calls it; a name that would not do as a folder's or an account's is replaced.

    >>> user_name(4242, None), user_name(1000, "anna"), user_name(7, "DOMAIN\\\\anna")
    ('user-4242', 'anna', 'user-7')
    """
    if uid == 0:
        return "root"
    return known if known and known != "root" and _NAME.fullmatch(known) else f"user-{uid}"


def parse_user(text: str) -> tuple[int, int | None]:
    """UID[:GID]; None: the caller's, or the user's own. Raises ContainerError for anything else."""
    match = re.fullmatch(r"(\d{1,10})(?::(\d{1,10}))?", text)
    if not match or int(match[1]) >= 2**32 - 1 or int(match[2] or 0) >= 2**32 - 1:
        raise ContainerError(f"--user {text}: give numbers, UID[:GID], e.g. --user 1000:1000")
    return int(match[1]), int(match[2]) if match[2] else None


def passwd_with(text: str, user: User) -> str:
    """The image's accounts with this one first. Another of the same name gives way; one of the same number stays."""
    line = f"{user.name}:x:{user.uid}:{user.gid}:{user.name}:{user.home}:/bin/sh"
    return "\n".join([line, *_others(text, user.name, str(user.uid) if user.uid == 0 else None)]) + "\n"


def group_with(text: str, user: User) -> str:
    """The same for its group; supplementary groups that the image does not know get names too."""
    known = {fields[2] for row in text.splitlines() if len(fields := row.split(":")) >= 3}
    own = "root" if user.gid == 0 else user.name
    lines = [f"{own}:x:{user.gid}:"]
    lines += [f"group-{gid}:x:{gid}:{user.name}" for gid in user.groups if gid != user.gid and str(gid) not in known]
    return "\n".join([*lines, *_others(text, own, str(user.gid) if user.gid == 0 else None)]) + "\n"


def account_archive(passwd: str, group: str, user: User) -> bytes:
    """A tar for the root of a container: its accounts, and the user's home."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in (("etc/passwd", passwd), ("etc/group", group)):
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
        for folder in (user.home, f"{user.home}/.cache"):
            entry = tarfile.TarInfo(folder.lstrip("/"))
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, user.uid, user.gid
            archive.addfile(entry)
    return content.getvalue()


def _others(text: str, name: str, replaced_number: str | None) -> list[str]:
    rows = [row for row in text.splitlines() if row.strip()]
    fields = [(row, row.split(":")) for row in rows]
    return [
        row
        for row, parts in fields
        if parts[0] != name and not (replaced_number is not None and parts[2:3] == [replaced_number])
    ]
