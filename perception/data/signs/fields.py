"""Files of labels and the values in them, checked: whatever is wrong is one line that names file, place and field."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perception.data.sample import ReadReport
from perception.errors import UserError

LARGEST_NUMBER = 1e7
"""Pixels and ids beyond this are damage, not data."""
LONGEST_TEXT = 1000
"""Characters of a name."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def read_text(path: Path, what: str, report: ReadReport) -> str:
    """Text of a UTF-8 file; `what` says in errors what the file should be ("LISA annotation file")."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {what} cannot be read ({error.strerror})") from None
    if data.startswith(codecs.BOM_UTF8):
        report.note("byte order mark: skipped", f"{path}:1")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: {what} is not UTF-8; save it as UTF-8") from None


def read_json(path: Path, what: str, report: ReadReport, unused: Collection[str] = ()) -> Any:
    """Contents of a JSON file. Fields named in `unused` are let go while parsing: outlines fill most of some files."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
            report.note("JSON key stands twice in an object: the last counts", f"{path}: {twice[0]}", len(twice))
        for name in unused:
            found.pop(name, None)
        return found

    text = read_text(path, what, report)
    if not text.strip():
        raise UserError(f"{path}: {what} is empty; copy it again from its source")
    try:
        return json.loads(text, object_pairs_hook=members)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}"
        raise UserError(f"{place}: {what} is not JSON ({error.msg} at column {error.colno}); is it whole?") from None
    except (RecursionError, ValueError):
        raise UserError(
            f"{path}: {what} is no usable JSON (nested too deep, or a number of thousands of digits)"
        ) from None


def read_rows(
    path: Path, what: str, report: ReadReport, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """("file:line", values by column) of a CSV file with a header, separated by semicolons or commas.

    Columns are found by name in any case and order; raises UserError where one of `columns` is missing, or a row has
    another number of values than the header.
    """
    text = read_text(path, what, report)
    separator = ";" if ";" in text.lstrip().partition("\n")[0] else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header: list[str] = []
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            values = [value.strip() for value in row]
            if not any(values):
                report.note("blank line: skipped", where)
            elif not header:
                header = [value.lower() for value in values]
                missing = [column for column in columns if column.lower() not in header]
                if missing:
                    raise UserError(f"{where}: column {missing[0]} is missing in the header; found {listed(values)}")
            elif len(values) != len(header):
                raise UserError(f"{where}: {len(values)} values in this row, the header has {len(header)}")
            else:
                yield where, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {what} is no CSV ({error})") from None
    if not header:
        raise UserError(f"{path}: {what} is empty; its first line names the columns {separator.join(columns)}")


def member(raw: Any, name: str, where: str) -> Any:
    """Field `name` of a JSON object."""
    if name not in an_object(raw, where):
        raise UserError(f"{where}: field {name} is missing; found {listed(sorted(raw))}")
    return raw[name]


def an_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, got {shown(value)}")
    return value


def a_list(value: Any, where: str, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where}: field {field} must be a list, got {shown(value)}")
    return value


def a_text(value: Any, where: str, field: str) -> str:
    """A text that is neither empty nor huge and stands in one line, so that it can be a name."""
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: field {field} must be a text, got {shown(value)}")
    if len(value) > LONGEST_TEXT or _CONTROL.search(value.strip()):
        raise UserError(f"{where}: field {field} must be a text in one line, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: field {field} holds half a character, got {shown(value)}") from None
    return value.strip()


def a_flag(value: Any, where: str, field: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where}: field {field} must be true or false, got {shown(value)}")
    return value


def a_number(value: Any, where: str, field: str) -> float:
    """A finite number, or a text that is one."""
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # Python alone takes "1_0" for a number.
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value) if not isinstance(value, str) or "_" not in value else math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: field {field} must be a finite number, got {shown(value)}")
    if abs(number) > LARGEST_NUMBER:
        raise UserError(f"{where}: field {field} = {shown(value)} is beyond any image")
    return number


def a_whole_number(value: Any, where: str, field: str, lowest: int = 0) -> int:
    number = a_number(value, where, field)
    if number != int(number) or number < lowest:
        raise UserError(f"{where}: field {field} must be a whole number from {lowest}, got {shown(value)}")
    return int(number)


def shown(value: Any) -> str:
    """A value as an error shows it: short."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    except TypeError:  # a date of YAML
        text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def listed(names: Iterable[str]) -> str:
    """Names as an error lists them: short, in one line."""
    return _CONTROL.sub("?", ", ".join(names)[:120]) or "none"
