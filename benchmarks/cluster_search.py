"""Search whole clusters for plans of large models, beside the configurations that were published for them.

    python benchmarks/cluster_search.py                                   # every case
    python benchmarks/cluster_search.py --case llama3-405b --json rows.json

Two layers are captured and priced by the split ILP; the others are copies. The published configuration and the chosen
one are priced by the same model, with the software that the published run's facts tell of (``published_runs.py``).
CPU seconds count the process; nothing is timed on the wall, because cores are shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.passes.candidates import Candidate, Limits
from autopar.passes.capture import capture
from autopar.passes.cost.compute import ATTENTION_SHARE
from autopar.passes.cost.devices import device
from autopar.passes.cost.overlap import overlap_slowdown
from autopar.passes.hardware import Hardware
from autopar.passes.price_regions import PricedRegion, price_regions, repeat_regions
from autopar.passes.program import Program
from autopar.passes.region_variants import Conditions
from autopar.passes.search_cluster import SPARE, ClusterSearcher, Found, hardware_conditions
from autopar.plans import Options
from benchmarks.models.transformer import build
from benchmarks.published_runs import Run, read_run
from benchmarks.run_constants import CONSTANTS
from benchmarks.run_links import data_link, network, node_size

DATA = Path(__file__).resolve().parent / "data"
CASES = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "gpt-1t", "mt-nlg-530b")
OPTIMIZER = "adamw-mixed"
SAVED_SCORE_BYTES = 5.0
"""Bytes kept for each attention score when attention is not fused: softmax, its dropout and the mask."""

COLUMNS = (
    "total_cpu_s", "capture_cpu_s", "price_cpu_s", "search_cpu_s", "peak_rss_bytes", "status", "gap",
    "predicted_step_s", "published_config_step_s", "published_step_s", "published_error",
    "chosen", "chosen_variants", "chosen_peak_bytes", "chosen_bubble",
    "published_config", "published_peak_bytes", "candidates", "pruned", "solved", "left", "bound_s",
)  # fmt: skip


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclasses.dataclass
class Case:
    """One model on one cluster with its published run.

    Attributes:
        name: of the case.
        run: the published run.
        layers, chunks, schedule: of the published configuration.
    """

    name: str
    run: Run
    layers: int
    chunks: int
    schedule: str

    def __post_init__(self) -> None:
        self.programs: dict[int, Program] = {}
        self.spent: Counter[str] = Counter()

    @property
    def hardware(self) -> Hardware:
        """The cluster."""
        run, per_node = self.run, node_size(self.run)
        return Hardware(run.num_devices // per_node, per_node, run.device, device(run.device).link_inside, network(run))

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.run.dp * self.run.micro_batch * self.run.steps

    def program(self, samples: int) -> Program:
        """Return the captured program of two layers for so many sequences."""
        if samples not in self.programs:
            begin = cpu_seconds()
            config = dataclasses.replace(self.run.model, sequence=self.run.model.sequence * self.run.cp)
            floats = {"bfloat16": torch.bfloat16, "float16": torch.float16}
            model, args = build(config, samples, floats[self.run.dtype])
            self.programs[samples] = capture(model, args, {})
            self.spent["capture"] += cpu_seconds() - begin  # type: ignore[assignment]
        return self.programs[samples]

    def price(self, mesh: Mesh, samples: int) -> tuple[PricedRegion, ...]:
        """Return all regions of the real depth on the mesh inside a stage."""
        program = self.program(samples)
        begin = cpu_seconds()
        regions = price_regions(program, mesh, Options(optimizer=OPTIMIZER))
        first = next(region.name for region in regions if region.name.startswith("layers."))
        deep = repeat_regions(regions, {first: self.layers - 1})
        self.spent["price"] += cpu_seconds() - begin  # type: ignore[assignment]
        return tuple(self._as_run(region, mesh, samples) for region in deep)

    def _as_run(self, region: PricedRegion, mesh: Mesh, samples: int) -> PricedRegion:
        """Return a region as the software of the run computes it: its attention, and transfers that it hides."""
        run = self.run
        shown = 1.0 - (CONSTANTS.tensor_hidden if run.overlaps_tensors else 0.0)
        times, score_bytes, saved = self._attention(mesh, samples) if region.forward.attention else (1.0, (0.0, 0.0), 0)
        bandwidth = device(run.device).stream_bytes_per_s
        forward, inputs = (
            dataclasses.replace(
                work,
                attention=work.attention * times,
                streams=work.streams + num_bytes / bandwidth,
                moves=work.moves * shown,
            )
            for work, num_bytes in zip((region.forward, region.input), score_bytes, strict=True)
        )
        return dataclasses.replace(
            region,
            forward=forward,
            input=inputs,
            weight=dataclasses.replace(region.weight, moves=region.weight.moves * shown),
            saved_bytes=region.saved_bytes + saved,
            light_bytes=region.light_bytes + saved,
        )

    def _attention(self, mesh: Mesh, samples: int) -> tuple[float, tuple[float, float], int]:
        """Return the factor on attention's seconds, bytes of scores forward and backward, and those that are kept."""
        run, model = self.run, self.run.model
        if run.attention != "unfused":
            share = CONSTANTS.attention_share(run.attention, run.generation, model.channels > 64)
            return ATTENTION_SHARE / share, (0.0, 0.0), 0
        scores = samples * model.heads / mesh.num_ranks * float(model.sequence) ** 2
        times = ATTENTION_SHARE / CONSTANTS.attention["unfused", "", False] * (2.0 if model.causal else 1.0)
        forward, backward = (scores * each for each in CONSTANTS.score_bytes)
        return times, (forward, backward), int(SAVED_SCORE_BYTES * scores)

    def conditions(self) -> Conditions:
        """Return what all candidates share: the run's software."""
        run = self.run
        return dataclasses.replace(
            hardware_conditions(self.hardware, OPTIMIZER),
            sustained=CONSTANTS.sustained_by(run.device, run.generation),
            streams=1.0 if run.fused_kernels else CONSTANTS.eager,
            contention=overlap_slowdown(data_link(run), device(run.device)),
            covered=CONSTANTS.hide_share if run.overlaps else 0.0,
        )

    def searcher(self, **changes: Any) -> ClusterSearcher:
        """Return a search; ``changes`` replace conditions."""
        budget = int(SPARE * device(self.run.device).memory_bytes)
        conditions = dataclasses.replace(self.conditions(), **changes)
        # an embedding, the norm and the head beside the layers
        regions = self.layers + 3
        return ClusterSearcher(self.hardware, self.batch, self.price, regions, conditions, budget, Limits())

    def published(self) -> Candidate:
        """Return the published configuration."""
        run = self.run
        inner = tuple(size for size in (run.cp, run.tp) if size > 1)
        schedule = self.schedule if run.pp > 1 else "1f1b"
        return Candidate(run.pp, run.dp, inner, run.micro_batch, run.steps, schedule, self.chunks)

    def price_published(self, search: ClusterSearcher) -> Found | None:
        """Return the published configuration with its own ZeRO stage and recomputation, or None when it can't fit."""
        again = {"none": ("", "light"), "full": ("full",)}.get(self.run.recompute, ("", "light", "full"))
        # With stages gradients are reduced once a step, after the last backward, also where they are then sharded.
        zero = (1, 2) if self.run.zero == 2 and self.run.pp > 1 else (self.run.zero,)
        only = self.searcher(zero=zero, recompute=again)
        only.priced = search.priced
        found = only.place(self.published())
        if found is None:
            # It ran, so memory is counted higher than it was: price it without the bound.
            only.budget = 16 * only.budget
            found = only.place(self.published())
        return found


def read_case(name: str) -> Case:
    """Return a case of ``CASES``."""
    entry = json.loads((DATA / "published_configs.json").read_text())[name]
    with gzip.open(DATA / "training_runs.json.gz", "rt") as file:
        row = next(row for row in json.load(file) if row["id"] == entry["row"])
    row.update({key: entry[key] for key in ("mbs", "iter_s", "recompute") if key in entry})
    return Case(name, read_run(row), entry["layers"], entry["chunks"], entry["schedule"])


def measure(name: str) -> dict[str, Any]:
    """Search one case and return its row."""
    begin = cpu_seconds()
    case = read_case(name)
    search = case.searcher()
    found = search.search()
    total = cpu_seconds() - begin
    published = case.price_published(search)
    best = found.best.placement
    regions = search.regions(found.best.candidate)
    variants = Counter(region.variants[at].name for region, at in zip(regions, best.variants, strict=True))
    step = published.step_s if published is not None else None
    return {
        "case": name,
        "total_cpu_s": round(total, 2),
        "capture_cpu_s": round(case.spent["capture"], 2),
        "price_cpu_s": round(case.spent["price"], 2),
        "search_cpu_s": round(total - case.spent["capture"] - case.spent["price"], 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "status": found.status,
        "gap": found.gap,
        "predicted_step_s": found.best.step_s,
        "published_config_step_s": step,
        "published_step_s": case.run.seconds,
        "published_error": None if step is None else step / case.run.seconds - 1.0,
        "chosen": str(found.best.candidate),
        "chosen_variants": dict(variants),
        "chosen_peak_bytes": max(best.simulation.peak_bytes),
        "chosen_bubble": best.simulation.bubble_share,
        "published_config": str(case.published()),
        "published_peak_bytes": None if published is None else max(published.placement.simulation.peak_bytes),
        "candidates": found.considered,
        "pruned": found.pruned,
        "solved": found.solved,
        "left": found.left,
        "bound_s": found.bound_s,
    }


def table(row: dict[str, Any]) -> str:
    """Return a row as text."""
    return "\n".join([row["case"], *(f"  {column:<24} {row[column]}" for column in COLUMNS)])


def main(arguments: list[str] | None = None) -> None:
    """Search the cases asked for; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(arguments)
    rows = []
    for name in [given.case] if given.case else CASES:
        rows.append(measure(name))
        print(table(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
