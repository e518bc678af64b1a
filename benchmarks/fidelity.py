"""Predicted against published step times of real clusters, by one set of constants.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --runs FILE --json FILE [--case SOURCE] [--rows]

Every row of the file is predicted or left out by a stated rule, and every rule counts. Which published figures the
constants were fitted on, and which only judge them, is written in ``docs/costs.md``; sources in ``FITTED`` are marked.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar.errors import AutoparError
from benchmarks.predict_run import predict
from benchmarks.published_runs import Run, read_run
from benchmarks.run_rules import SkippedError

DATA = Path(__file__).resolve().parent / "data" / "training_runs.json.gz"
FITTED = (
    "dgxc-benchmarking",
    "dlperf-gpt-v100",
    "llm-foundry-hist",
    "megatron-bridge-perf",
    "megatron-readme-2020",
    "megatron-sc21-t2",
    "torchao-training-doc",
    "torchtitan-202412",
)
"""Sources that constants were fitted on; the others judge them."""

FEWEST = 5
"""Rows that a source needs for its rank correlation to count."""


class Pair(NamedTuple):
    """Predicted and measured seconds of one row, its number of stages, and whether its model has routed experts."""

    predicted: float
    measured: float
    stages: int
    experts: bool


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, gzipped or not; an object may hold them under ``rows``; what is no row is empty."""
    raw = path.read_bytes()
    content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise SystemExit(f"{path} holds no list of rows: write one, or an object with it under 'rows'")
    return [row if isinstance(row, dict) else {} for row in rows]


def ranks(values: list[float]) -> list[float]:
    """Return the ranks of values, equal values sharing the mean of theirs.

    >>> ranks([3.0, 1.0, 3.0])
    [1.5, 0.0, 1.5]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    out = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for at in order[start : end + 1]:
            out[at] = (start + end) / 2
        start = end + 1
    return out


def spearman(first: list[float], second: list[float]) -> float | None:
    """Return the rank correlation, or None where one side does not vary or has fewer than two values.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    if len(first) < 2:
        return None
    a, b = ranks(first), ranks(second)
    middle = (len(a) - 1) / 2
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    below = (sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)) ** 0.5
    return top / below if below else None


def most_spearman(predicted: list[float], measured: list[float]) -> float | None:
    """Return the highest rank correlation that predictions can have which are equal where these are.

    Rows that state the same facts are predicted alike, however their measurements differ.

    >>> most_spearman([1.0, 1.0, 5.0], [2.0, 3.0, 4.0])
    0.8660254037844387
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for value, rank in zip(predicted, ranks(measured), strict=True):
        groups[value].append(rank)
    return spearman([sum(groups[value]) / len(groups[value]) for value in predicted], measured)


def summarise(source: str, given: int, pairs: list[Pair], skipped: Counter[str]) -> dict[str, Any]:
    """Return the row of one source: errors as fractions of the measured time, those of some kinds apart as well."""
    predicted, measured = [pair.predicted for pair in pairs], [pair.measured for pair in pairs]
    return {
        "source_id": source,
        **errors_of(pairs),
        "spearman": spearman(predicted, measured),
        "spearman_at_most": most_spearman(predicted, measured),
        **{kind: apart(pairs, kind) for kind in KINDS},
        "rows_given": given,
        "rows_used": len(pairs),
        "skipped": dict(sorted(skipped.items())),
        "fitted": source in FITTED,
    }


KINDS = {
    "without_stages": lambda pair: pair.stages == 1,
    "without_experts": lambda pair: not pair.experts,
    "with_experts": lambda pair: pair.experts,
}
"""Kinds of rows whose errors are shown apart."""


def apart(pairs: list[Pair], kind: str) -> dict[str, Any]:
    """Return the errors and the number of those rows that are of a kind."""
    some = [pair for pair in pairs if KINDS[kind](pair)]
    return {**errors_of(some), "rows_used": len(some)}


def errors_of(pairs: list[Pair]) -> dict[str, float | None]:
    """Return the mean and the worst error as fractions of the measured time."""
    errors = [abs(pair.predicted / pair.measured - 1) for pair in pairs]
    return {"mape": sum(errors) / len(errors) if errors else None, "worst": max(errors, default=None)}


def order_of(run: Run) -> tuple[Any, ...]:
    """Return the key that brings runs of one captured program together."""
    return (repr(run.model), run.micro_batch, run.dtype, run.device, run.tp, run.narrow)


def compare(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return one summary a source with ``all`` last, and what was predicted for every row used."""
    given = Counter(str(row.get("source_id")) for row in rows)
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    runs = []
    for row in rows:
        try:
            runs.append(read_run(row))
        except SkippedError as reason:
            skipped[str(row.get("source_id"))][str(reason)] += 1
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError):
            skipped[str(row.get("source_id"))]["a figure is missing or of the wrong type"] += 1
    pairs: dict[str, list[Pair]] = defaultdict(list)
    detail = []
    for run in sorted(runs, key=order_of):
        try:
            found = predict(run)
        except (AutoparError, RuntimeError, ValueError, ArithmeticError) as error:
            skipped[run.source][f"can't be captured or split as it says: {type(error).__name__}"] += 1
            continue
        pairs[run.source].append(Pair(found["seconds"], run.seconds, run.pp, run.experts is not None))
        detail.append({"id": run.row_id, "source_id": run.source, "measured": run.seconds, **found})
    table = [summarise(source, given[source], pairs[source], skipped[source]) for source in sorted(given)]
    total: Counter[str] = sum(skipped.values(), Counter())
    whole = summarise("all", len(rows), [pair for found in pairs.values() for pair in found], total)
    counted = [row["spearman"] for row in table if row["rows_used"] >= FEWEST and row["spearman"] is not None]
    whole["spearman"] = sum(counted) / len(counted) if counted else None
    whole["spearman_at_most"] = None
    return [*table, whole], detail


def show(table: list[dict[str, Any]]) -> str:
    """Return the table as text, sources without a row used in one line of counts."""
    lines = [f"{'source':36} {'mape':>7} {'worst':>7} {'spearman':>8} {'at most':>8} {'used':>5} {'given':>5}"]
    for row in table:
        if row["rows_used"]:
            rank, most = (
                "" if value is None else f"{value:.3f}" for value in (row["spearman"], row["spearman_at_most"])
            )
            name = row["source_id"] + (" (fitted)" if row["fitted"] else "")
            counts = f"{row['rows_used']:5} {row['rows_given']:5}"
            lines.append(f"{name:36} {row['mape']:7.1%} {row['worst']:7.1%} {rank:>8} {most:>8} {counts}")
    for kind in KINDS:
        some = table[-1][kind]
        if some["rows_used"]:
            name = f"of which {kind.replace('_', ' ')}"
            lines.append(f"{name:36} {some['mape']:7.1%} {some['worst']:7.1%} {'':17} {some['rows_used']:5}")
    lines.append("\nleft out, by rule:")
    lines += [f"{count:6}  {rule}" for rule, count in sorted(table[-1]["skipped"].items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def main() -> None:
    """Run the comparison, print its table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA, help="published runs, as JSON or gzipped JSON")
    parser.add_argument("--json", type=Path, help="write the table as an object with rows")
    parser.add_argument("--case", help="one source_id alone")
    parser.add_argument("--rows", action="store_true", help="write every predicted row too")
    options = parser.parse_args()
    rows = read_rows(options.runs)
    if options.case:
        rows = [row for row in rows if row.get("source_id") == options.case]
    table, detail = compare(rows)
    print(show(table))
    if options.json:
        content = {"rows": table, **({"runs": detail} if options.rows else {})}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
