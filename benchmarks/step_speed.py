"""Steps of lowered programs beside hand-written ones: the same strategy, and autopar's own plan against the best.

    python benchmarks/step_speed.py --ranks 2 --quick --json rows.json
    python benchmarks/step_speed.py --ranks 4 --case gpt-large --trace steps.json
    python benchmarks/step_speed.py --ranks 1
    python benchmarks/step_speed.py --ranks 4 --overheads
    python benchmarks/step_speed.py --ranks 2 --soak 1000

The machine is calibrated by all processes at once. Then every model trains in every way at the same time: one step of
each in turn, so that what else runs on the machine slows all alike. A step is forward, backward, AdamW. Before anything
is timed the losses of all ways must agree. A ratio is the median over the rounds of the two times of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar.mesh import Mesh
from benchmarks.run_processes import run_processes
from benchmarks.speed_cases import CASES, Case
from benchmarks.speed_overheads import first_step, plan_gpt2, soak
from benchmarks.speed_plans import OWN, speed_plans
from benchmarks.speed_race import OPTIMIZERS, Race, measure_profile, race

SAME = "as "
QUICK = tuple(case.name for case in CASES if case.name.endswith("small"))


def make_profile(ranks: int, budget_s: float, path: str | None) -> str:
    """Return the path of a profile of this machine, measured now if there is none."""
    path = path or tempfile.mktemp(prefix="this-machine-", suffix=".json")
    if not Path(path).exists():
        run_processes(ranks, measure_profile, path, budget_s)
    return path


def make_row(case: Case, ranks: int, profile: str, how: dict[str, Any], trace: Path | None) -> dict[str, Any]:
    """Return the row of a model: ratios with their quartiles, seconds, bytes, and what could not run."""
    plans, refused = speed_plans(case, ranks, profile)
    found: Race = run_processes(ranks, race, case, plans, how, trace)[0]
    rows = found.seconds
    peers = {title: times for title, times in rows.items() if title != OWN and not title.startswith(SAME)}
    best = min(peers, key=lambda title: statistics.median(peers[title]), default=None)
    row: dict[str, Any] = {"model": case.name, "ranks": ranks, "best_peer": best}
    spread: dict[str, Any] = {}
    row["own_over_best"] = None
    if best is not None and OWN in rows:
        row["own_over_best"], spread["own_over_best"] = ratio(rows[OWN], rows[best])
    row["same_over_peer"], spread["same_over_peer"] = {}, {}
    for title in peers:
        if SAME + title in rows:
            value, quartiles = ratio(rows[SAME + title], rows[title])
            row["same_over_peer"][title], spread["same_over_peer"][title] = value, quartiles
    row |= {"hidden_fraction": found.hidden_fraction.get(OWN), "peak_bytes": found.peak_bytes.get(OWN)}
    spread["step_s"] = {title: quartiles_of(times) for title, times in rows.items()}
    row |= {"spread": spread, "step_s": {title: statistics.median(times) for title, times in rows.items()}}
    row |= {"hidden_fraction_of": found.hidden_fraction, "peak_bytes_of": found.peak_bytes}
    row |= {"python_s_of": found.python_s, "losses": found.losses, "rounds": found.rounds}
    row |= cpu_ratios(found, best)
    row["predicted_s"] = {title: made.step_seconds for title, made in plans.items() if made.step_seconds}
    row["predicted_hidden_fraction_of"] = {
        title: made.cost.hidden_seconds / made.cost.communication_seconds
        for title, made in plans.items()
        if made.cost.communication_seconds
    }
    row["predicted_hidden_fraction"] = row["predicted_hidden_fraction_of"].get(OWN)
    row["failed"] = {SAME + title: reason for title, reason in refused.items()} | found.failed
    return row


def cpu_ratios(found: Race, best: str | None) -> dict[str, Any]:
    """Return the ratios of processor time: they say less, but other work on the machine hardly moves them."""
    times = found.cpu_seconds
    own = ratio(times[OWN], times[best])[0] if best is not None and OWN in times else None
    same = {title: ratio(times[SAME + title], times[title])[0] for title in times if SAME + title in times}
    return {"cpu_own_over_best": own, "cpu_same_over_peer": same}


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, list[float]]:
    """Return the median over the rounds of the ratio of two times, and its quartiles."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ratios), quartiles_of(ratios)


def quartiles_of(values: list[float]) -> list[float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return [*values, *values]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return over all models: how often autopar's own plan is ahead, its worst, and the same strategies."""
    out: dict[str, Any] = {}
    for kind in ("", "cpu_"):
        own = [row[f"{kind}own_over_best"] for row in rows if row[f"{kind}own_over_best"] is not None]
        same: dict[str, list[float]] = {}
        for row in rows:
            for title, value in row[f"{kind}same_over_peer"].items():
                same.setdefault(title, []).append(value)
        out[f"{kind}own_over_best"] = _figures(own)
        out[f"{kind}own_ahead"] = f"{sum(value < 1 for value in own)} of {len(own)}"
        out[f"{kind}same_over_peer"] = {title: _figures(values) for title, values in same.items()}
    return out


def _figures(values: list[float]) -> dict[str, float] | None:
    return {"median": statistics.median(values), "worst": max(values)} if values else None


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'model':13} own/best (processor)  quartiles   best peer  hidden/predicted  peak MB  same strategy over peer"
    ]
    for row in rows:
        own = row["own_over_best"]
        first, third = row["spread"].get("own_over_best", (float("nan"),) * 2)
        cpu = row["cpu_same_over_peer"]
        same = ", ".join(f"{title} {value:.2f} ({cpu[title]:.2f})" for title, value in row["same_over_peer"].items())
        kinds = ("hidden_fraction", "predicted_hidden_fraction")
        hidden = "/".join("-" if row[kind] is None else f"{row[kind]:.0%}" for kind in kinds)
        peak = f"{(row['peak_bytes'] or 0) / 1e6:.1f}"
        value = f"{own:8.2f} ({row['cpu_own_over_best']:.2f})" if own is not None else f"{'-':>8}"
        lines.append(
            f"{row['model']:13} {value}  {first:.2f}-{third:.2f}   {row['best_peer'] or '-':12} {hidden:>13} {peak:>8}"
            f"  {same}"
        )
        lines += [f"    {title}: {reason.splitlines()[0][:150]}" for title, reason in row["failed"].items()]
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the small models only, few rounds")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this model")
    parser.add_argument("--compiled", action="store_true", help="both sides compiled")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="fused", help="AdamW's implementation on both sides")
    parser.add_argument("--seconds", type=float, help="for the rounds of one model")
    parser.add_argument("--profile", help="a profile to use, made here if it does not exist")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of autopar's steps on the first rank")
    parser.add_argument("--overheads", action="store_true", help="only the time to the first step of GPT-2 small")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="only so many steps of one small model")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser.parse_args(arguments)


def measure_overheads(given: argparse.Namespace) -> dict[str, Any]:
    """Return the time to the first step, by the slowest rank, or what many steps showed on the first."""
    found: dict[str, Any] = {}
    mesh = Mesh((given.ranks,), ("ranks",), given.profile or "cpu")
    if given.overheads:
        steps = run_processes(given.ranks, first_step, mesh, None)
        found["planned"] = {key: max(rank[key] for rank in steps) for key in steps[0]}
        steps = run_processes(given.ranks, first_step, mesh, plan_gpt2(mesh))
        found["with_a_plan"] = {key: max(rank[key] for rank in steps) for key in steps[0]}
    if given.soak:
        case = next(case for case in CASES if case.name in (given.case or ["gpt-small"]))
        plans, _ = speed_plans(case, given.ranks, given.profile or "cpu")
        found["soak"] = run_processes(given.ranks, soak, case, plans[OWN], given.soak)[0]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Calibrate, race, print, write."""
    given = parse(arguments)
    if given.overheads or given.soak:
        found = measure_overheads(given)
        print(json.dumps(found, indent=1))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    names = given.case or (QUICK if given.quick else [case.name for case in CASES])
    seconds = given.seconds or (6.0 if given.quick else 40.0)
    profile = make_profile(given.ranks, 10.0 if given.quick else 30.0, given.profile)
    how = {"compiled": given.compiled, "optimizer": given.optimizer, "seconds": seconds}
    rows = []
    for case in CASES:
        if case.name not in names:
            continue
        rows.append(make_row(case, given.ranks, profile, how, given.trace) | how)
        print(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:]).split("\n", 1)[1], flush=True)
        if given.json:
            given.json.write_text(json.dumps({"rows": rows, "summary": summary(rows)}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
