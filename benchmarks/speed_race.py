"""Race one model in every way: on each rank one step of each way in turn."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.plans import Plan
from autopar.runtime.calibrate import calibrate, describe, name_links
from benchmarks.speed_cases import Case
from benchmarks.speed_events import read_events, watch
from benchmarks.speed_peers import PEERS, NoRoom, Racer, Setting, make_peer, make_plain
from benchmarks.speed_pipeline import PIPELINE, make_pipeline
from benchmarks.speed_plans import OWN, mesh_of

SAME, PLAIN = "as ", "plain"
LEARNING_RATE = 1e-4
"""So small that rounding stays rounding over the steps before: at 1e-3 a change of all parameters by 1e-7 moves the
third loss of a residual network by 0.3 %, at 1e-4 by 0.002 %."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "default": partial(torch.optim.AdamW, lr=LEARNING_RATE),
    "foreach": partial(torch.optim.AdamW, lr=LEARNING_RATE, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
}
WARM_UP = 3
WATCHED = 2
FEWEST, MOST = 7, 101
LOSS_TOLERANCE = 2e-4


@dataclass
class Race:
    """What one rank saw; the seconds are those of the slowest rank.

    Attributes:
        seconds: way -> seconds of its step in every round.
        cpu_seconds: the same, of processor time, summed over the ranks.
        losses: way -> loss of the global batch in the steps before.
        hidden_fraction, python_s, peak_bytes: way -> what the profiler says of a step on this rank.
        failed: way -> why it did not run.
        rounds: how many.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    hidden_fraction: dict[str, float | None] = field(default_factory=dict)
    python_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rounds: int = 0


def measure_profile(rank: int, path: str, budget_s: float) -> None:
    """Calibrate; the first rank writes the profile."""
    profile = name_links(calibrate("cpu", budget_s=budget_s), path)
    if rank == 0:
        Path(path).write_text(json.dumps(profile, indent=1))
        print(describe(profile, path), flush=True)


def race(rank: int, case: Case, plans: Mapping[str, Plan], how: Mapping[str, Any], trace: Path | None) -> Race:
    """Train a model in every way, and return what was seen. Collective.

    Args:
        rank: of this process.
        case: the model.
        plans: by what they are called; a peer's name stands for its strategy.
        how: ``compiled``, ``optimizer`` (one of ``OPTIMIZERS``), ``seconds`` for the rounds.
        trace: where the first rank writes a Chrome trace of autopar's steps.
    """
    found = Race()
    setting = Setting(case, dist.get_world_size(), rank, how["compiled"], OPTIMIZERS[how["optimizer"]])
    racers = [racer for racer in _enter(setting, plans, found) if _warm_up(racer, found)]
    _compare_losses(found)
    _run_rounds(racers, how["seconds"], found)
    for racer in racers:
        _watch(racer, found, trace if rank == 0 and racer.title == OWN else None)
    return found


def _enter(setting: Setting, plans: Mapping[str, Plan], found: Race) -> Iterable[Racer]:
    """Yield all ways that can be made; say why the others can't."""
    ways: dict[str, Callable[[], Racer]] = {
        (title if title == OWN else SAME + title): partial(_parallelized, title, setting, made)
        for title, made in plans.items()
    }
    if setting.ranks == 1:
        ways = {OWN: ways[OWN], PLAIN: partial(make_plain, setting)}
    else:
        ways |= {title: partial(make_peer, title, setting) for title in PEERS}
        ways[PIPELINE] = partial(make_pipeline, setting)
    for title, make in ways.items():
        try:
            yield make()
        except NoRoom:
            continue
        except Exception as error:  # what failed is in the row, by name
            found.failed[title] = f"{type(error).__name__}: {error}"


def _parallelized(title: str, setting: Setting, made: Plan) -> Racer:
    inputs = setting.case.make_inputs()
    options = {"compile": True} if setting.compiled else {}
    model = autopar.parallelize(
        setting.case.make_model(), mesh_of(title, made, setting.ranks), inputs, plan=made, **options
    )
    optimizer = setting.optimizer(model.parameters())
    return Racer(title if title == OWN else SAME + title, model, inputs, optimizer)


def _warm_up(racer: Racer, found: Race) -> bool:
    try:
        found.losses[racer.title] = [racer.global_loss() for _ in range(WARM_UP)]
    except Exception as error:  # what failed is in the row, by name
        found.failed[racer.title] = f"{type(error).__name__}: {error}"
        return False
    return True


def _compare_losses(found: Race) -> None:
    """Check that every way trains the same model.

    Raises:
        RuntimeError: one does not; names both.
    """
    (first, wanted), *others = found.losses.items()
    for title, losses in others:
        if not all(math.isclose(a, b, rel_tol=LOSS_TOLERANCE) for a, b in zip(wanted, losses)):
            raise RuntimeError(f"{title} trains another model than {first}: losses {losses}, not {wanted}")


def _run_rounds(racers: list[Racer], budget_s: float, found: Race) -> None:
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    for racer in racers:
        _time(racer)
    rounds = torch.tensor([budget_s / (time.perf_counter() - begin)])
    dist.broadcast(rounds, 0)
    found.rounds = min(MOST, max(FEWEST, int(rounds)))
    times, cpu_times = torch.zeros(2, found.rounds, len(racers), dtype=torch.float64)
    for turn in range(found.rounds):
        for place in range(len(racers)):
            index = (place + turn) % len(racers)
            times[turn, index], cpu_times[turn, index] = _time(racers[index])
        gc.collect(1)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_times)
    found.seconds = {racer.title: times[:, index].tolist() for index, racer in enumerate(racers)}
    found.cpu_seconds = {racer.title: cpu_times[:, index].tolist() for index, racer in enumerate(racers)}
    gc.enable()


def _time(racer: Racer) -> tuple[float, float]:
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    racer.step()
    return time.perf_counter() - begin, time.process_time() - cpu


def _watch(racer: Racer, found: Race, trace: Path | None) -> None:
    """Run steps under the profiler: all ranks together, so that collectives meet."""
    held = _held_bytes(racer)

    def steps() -> list[Tensor]:
        return [racer.step() for _ in range(WATCHED)]

    dist.barrier()
    seen = read_events(watch(steps, trace))
    found.hidden_fraction[racer.title] = seen.hidden_fraction
    found.python_s[racer.title] = seen.python_s / WATCHED
    found.peak_bytes[racer.title] = held + seen.peak_bytes


def _held_bytes(racer: Racer) -> int:
    """Return the bytes of parameters, buffers and optimizer state, each storage once."""
    state = [value for values in racer.optimizer.state.values() for value in values.values()]
    tensors = [*racer.module.parameters(), *racer.module.buffers(), *state]
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) + racer.extra_bytes
