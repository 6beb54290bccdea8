"""The long record of all nights: one Parquet partition a night, written by the controller alone, read by DuckDB.

The only importer of duckdb.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perception.errors import UserError
from sweeps.record import JobRecord, NightRecord

if TYPE_CHECKING:
    import duckdb

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning; new columns need no new version: older files lack them, and records take
their defaults."""
NIGHT_FILE, JOBS_FILE = "night.parquet", "jobs.parquet"

_Record = TypeVar("_Record", JobRecord, NightRecord)


class History:
    """Records of a root folder of nights, under `records/night=NAME/{night,jobs}.parquet`.

    The night's file is written last and holds the sha256 of the jobs file and of its own row: a partition whose writing
    was interrupted, or whose bytes changed, is known as such.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / "records"
        self._left_out: dict[Path, str] = {}
        self._nights: dict[Path, tuple[tuple[int, ...], NightRecord]] = {}
        """Partition → when its files were written and how large they were, and what the night's file held."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line for each partition that could not be read: damaged, unfinished or of a newer version."""
        return tuple(self._left_out.values())

    def append_night(self, night: NightRecord, jobs: Sequence[JobRecord]) -> None:
        """Write the night's partition, in place of an earlier one of the same name."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", night.night):
            raise UserError(f"night {night.night!r}: a name is of letters, digits, dots and dashes, e.g. 2026-11-30.2")
        others = {job.night for job in jobs} - {night.night}
        if others:
            raise ValueError(f"night {night.night}: jobs of night {min(others)} among its own")
        partition = self.folder / f"night={night.night}"
        try:
            partition.mkdir(parents=True, exist_ok=True)
            for left in partition.glob(".*.parquet.*"):
                left.unlink(missing_ok=True)  # Of a controller that was killed.
            with contextlib.closing(_connect()) as connection:
                digest = _write(connection, partition / JOBS_FILE, JobRecord, jobs, {})
                row = _row_digest({name: _to_cell(getattr(night, name)) for name in _columns(NightRecord)})
                notes = {"jobs_sha256": digest, "row_sha256": row}
                _write(connection, partition / NIGHT_FILE, NightRecord, [night], notes)
        except OSError as error:
            raise UserError(f"{partition}: cannot be written ({error.strerror}); make room there") from None

    def nights(self, last: int | None = None) -> list[NightRecord]:
        """In order of their begin; the `last` so many, or all."""
        with contextlib.closing(_connect()) as connection:
            found = sorted(self._read_nights(connection).values(), key=lambda night: (night.started_utc, night.night))
        return found if last is None else found[max(0, len(found) - last) :]

    def jobs(self, model: str | None = None, nights: int | Collection[str] | None = None) -> list[JobRecord]:
        """Of one model or all; of the last so many nights, those named, or all; by night, then as they were given."""
        with contextlib.closing(_connect()) as connection:
            by_partition = self._read_nights(connection)
            order = sorted(by_partition, key=lambda path: (by_partition[path].started_utc, by_partition[path].night))
            if isinstance(nights, int):
                order = order[max(0, len(order) - nights) :]
            elif nights is not None:
                order = [partition for partition in order if by_partition[partition].night in nights]
            return [job for partition in order for job in self._read_jobs(connection, partition, model)]

    def _read_nights(self, connection: duckdb.DuckDBPyConnection) -> dict[Path, NightRecord]:
        found: dict[Path, NightRecord] = {}
        for partition in sorted(self.folder.glob("night=*")):
            try:
                files = [(partition / name).stat() for name in (NIGHT_FILE, JOBS_FILE)]
                stamp = tuple(number for about in files for number in (about.st_mtime_ns, about.st_size))
                if partition not in self._nights or self._nights[partition][0] != stamp:
                    self._nights[partition] = stamp, _read_night(connection, partition)
                found[partition] = self._nights[partition][1]
                self._left_out.pop(partition, None)
            except _UnreadableError as error:
                self._leave_out(partition, str(error))
            except OSError as error:
                self._leave_out(partition, f"{Path(str(error.filename)).name}: {error.strerror}")
        return found

    def _read_jobs(self, connection: duckdb.DuckDBPyConnection, partition: Path, model: str | None) -> list[JobRecord]:
        try:
            return _read(connection, partition / JOBS_FILE, JobRecord, model)[0]
        except _UnreadableError as error:
            self._leave_out(partition, str(error))
            return []

    def _leave_out(self, partition: Path, reason: str) -> None:
        self._left_out[partition] = (
            f"{partition}: left out ({reason}); run that night's `nightly` again to write it anew from its journal, "
            "or remove the folder"
        )


class _UnreadableError(Exception):
    """Why a file cannot be read."""


def _read_night(connection: duckdb.DuckDBPyConnection, partition: Path) -> NightRecord:
    path = partition / NIGHT_FILE
    rows, notes, cells = _read(connection, path, NightRecord, None)
    if len(rows) != 1:
        raise _UnreadableError(f"{NIGHT_FILE} holds {len(rows)} nights instead of one")
    if _row_digest({name: column[0] for name, column in cells.items()}) != notes.get("row_sha256"):
        raise _UnreadableError(f"{NIGHT_FILE} is damaged: its row is not the one that was written")
    if _sha256(partition / JOBS_FILE) != notes.get("jobs_sha256"):
        raise _UnreadableError(f"{JOBS_FILE} is not the one that {NIGHT_FILE} was written with")
    return rows[0]


def _connect() -> duckdb.DuckDBPyConnection:
    import duckdb

    # Nothing is fetched from a network, and a few files do not need all cores.
    return duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 2}
    )


def _write(
    connection: duckdb.DuckDBPyConnection,
    path: Path,
    record: type[JobRecord] | type[NightRecord],
    records: Sequence[JobRecord | NightRecord],
    notes: Mapping[str, str],
) -> str:
    """Replace a file as a whole; returns its sha256."""
    import duckdb

    columns = _columns(record)
    values = [[_to_cell(getattr(row, name)) for row in records] for name in columns]
    selected = ", ".join(
        f'unnest(?::{kind}[]) AS "{name}"' for name, kind in columns.items()
    )  # Names and types are those of our own fields.
    marks = ", ".join(
        f"{key}: {_quoted(value)}" for key, value in {"roadfuse_schema": str(SCHEMA_VERSION), **notes}.items()
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        connection.execute(
            f"COPY (SELECT {selected}) TO {_quoted(str(temporary))} "
            f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{marks}}})",
            values,
        )
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        digest = _sha256(temporary)
        temporary.replace(path)
        return digest
    except duckdb.IOException as error:
        raise UserError(f"{path}: cannot be written ({_first_line(error)}); make room there") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read(
    connection: duckdb.DuckDBPyConnection, path: Path, record: type[_Record], model: str | None
) -> tuple[list[_Record], dict[str, str], dict[str, tuple[Any, ...]]]:
    """Rows of a file, of one model where it is given; what was noted in the file; its cells by column."""
    import duckdb

    fields = _columns(record)
    try:
        marks = connection.execute("SELECT key, value FROM parquet_kv_metadata(?)", [str(path)]).fetchall()
        notes = {key.decode(): value.decode() for key, value in marks}
        version = notes.get("roadfuse_schema", "")
        if version != str(SCHEMA_VERSION):
            raise _UnreadableError(
                f"{path.name} is of schema {version or 'unknown'}, this version reads {SCHEMA_VERSION}"
            )
        where, values = ("WHERE model = ?", [str(path), model]) if model is not None else ("", [str(path)])
        found = connection.execute(f"SELECT * FROM read_parquet(?, hive_partitioning = false) {where}", values)
        names = [column[0] for column in found.description or []]
        rows = found.fetchall()
    except duckdb.Error as error:
        raise _UnreadableError(f"{path.name} is damaged: {_first_line(error)}") from None
    unknown = sorted(set(names) - set(fields))
    if unknown:
        raise _UnreadableError(f"{path.name} has column {unknown[0]}, which this version does not know: update it")
    missing = _required(record) - set(names)
    if missing:
        raise _UnreadableError(f"{path.name} has no column {min(missing)}")
    # Column by column: a row at a time takes three times as long.
    cells_of = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
    columns = [
        _values(field, fields[field.name], cells_of.get(field.name), len(rows)) for field in dataclasses.fields(record)
    ]
    return [record(*values) for values in zip(*columns, strict=True)], notes, cells_of


def _values(field: dataclasses.Field[Any], kind: str, cells: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """A field's values of all rows; its default where the file has no such column."""
    if cells is None:
        if field.default_factory is not dataclasses.MISSING:
            return [field.default_factory() for _ in range(count)]
        return [field.default] * count
    if kind == "VARCHAR[]":
        return [tuple(cell) for cell in cells]
    if field.default_factory is dict:
        return [json.loads(cell) for cell in cells]
    return cells


def _columns(record: type[JobRecord] | type[NightRecord]) -> dict[str, str]:
    """Field → DuckDB's type; nested values are kept as JSON, whose fields SQL can reach."""
    kinds = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", dict: "VARCHAR", tuple: "VARCHAR[]"}
    hints = typing.get_type_hints(record)
    return {field.name: kinds[_plain_type(hints[field.name])] for field in dataclasses.fields(record)}


def _plain_type(hint: Any) -> type:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _plain_type(next(part for part in typing.get_args(hint) if part is not type(None)))
    if origin is typing.Literal:
        return str
    return origin or hint  # type: ignore[no-any-return]


def _required(record: type[JobRecord] | type[NightRecord]) -> set[str]:
    missing = dataclasses.MISSING
    return {
        field.name
        for field in dataclasses.fields(record)
        if field.default is missing and field.default_factory is missing
    }


def _to_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    return list(value) if isinstance(value, tuple) else value


def _row_digest(cells: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
