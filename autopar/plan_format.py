"""The plan's file format: canonical JSON, read with distrust.

A plan may come from anybody, so nothing in it is believed: the text is bounded, parsed without running anything,
converted with every field checked by type, and then held against the plan's own invariants.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from autopar.errors import PlanError
from autopar.plan_check import check_plan
from autopar.plan_records import SCHEMA, PlanRecord

__all__ = ["check_plan", "decode_plan", "encode_plan", "read_plan", "write_plan"]

MAX_FILE_BYTES = 1 << 28

P = TypeVar("P", bound=PlanRecord)


def encode_plan(plan: PlanRecord) -> bytes:
    """Return ``plan`` as canonical JSON: fields in their order, keys sorted, one line an entry, no measured seconds.

    Raises:
        PlanError: the plan breaks an invariant (nothing is written that could not be read).
    """
    check_plan(plan)
    plan = msgspec.structs.replace(plan, solver=msgspec.structs.replace(plan.solver, seconds=0.0))
    return msgspec.json.format(msgspec.json.encode(plan, order="deterministic"), indent=1) + b"\n"


def decode_plan(data: bytes, kind: type[P], source: str = "the plan") -> P:
    """Return the plan in ``data``, as an instance of ``kind``; ``source`` says in errors where the text came from.

    Raises:
        PlanError: the text is no plan of this schema; the message says where it is wrong and what to do.
    """
    tree = _parse(data, source)
    _check_schema(tree, source)
    try:
        plan = msgspec.convert(tree, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise PlanError(f"{source} does not have the form of a plan: {error}; plan again and save it anew") from error
    check_plan(plan)
    return plan


def read_plan(path: Path, kind: type[P]) -> P:
    """Return the plan in the file ``path``.

    Raises:
        PlanError: as ``decode_plan``, or the file can't be read or is too large to be a plan.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise PlanError(f"{path} has {size} bytes; no plan is larger than {MAX_FILE_BYTES}: is it the right file?")
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"the plan file {path} can't be read: {error.strerror}; check the path") from error
    return decode_plan(data, kind, str(path))


def write_plan(plan: PlanRecord, path: Path) -> None:
    """Write ``plan`` to ``path``: the whole file or, on failure, nothing.

    Raises:
        PlanError: the plan breaks an invariant, or the file can't be written.
    """
    data = encode_plan(plan)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanError(
            f"the plan can't be written to {path}: {error.strerror}; check that the folder exists"
        ) from error


def _parse(data: bytes, source: str) -> Any:
    advice = "it may be cut short or no plan at all: save it anew"
    try:
        return json.loads(data, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise PlanError(f"{source} is not JSON ({error.msg}, line {error.lineno}); {advice}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{source} is not text in UTF-8 (byte {error.start}); {advice}") from error
    except RecursionError as error:
        raise PlanError(f"{source} nests deeper than any plan does; {advice}") from error
    except ValueError as error:  # repeated names, NaN, and numbers of thousands of digits
        raise PlanError(f"{source} is refused: {error}; {advice}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {repeated[:80]!r} stands twice in one object")
    return out


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that a plan may hold")


def _check_schema(tree: Any, source: str) -> None:
    if not isinstance(tree, dict) or "schema" not in tree:
        raise PlanError(f"{source} is JSON but no plan: it names no schema; pass a file that Plan.save wrote")
    schema = tree["schema"]
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise PlanError(f"{source} names the schema {str(schema)[:80]!r}, which is no whole number; save the plan anew")
    if schema > SCHEMA:
        raise PlanError(
            f"{source} has schema {schema}, and this autopar reads schemas up to {SCHEMA}: "
            "upgrade autopar, or plan again with this version"
        )
    if schema < SCHEMA:
        raise PlanError(f"{source} has schema {schema}, which no autopar wrote; save the plan anew")
