"""Measure the machine that it runs on, and write a device and link profile that prices plans.

Matrix products by shape and dtype, a stream through caches and memory, the call of a small op and of a view, attention
and convolution beside plain products, random numbers, and, when there are processes, every collective by size on the
actual group. ``measure.py`` says how time is taken. Figures are fitted to the forms that ``passes/cost`` prices with.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import minimize

from autopar.errors import OptionError
from autopar.passes.cost.collectives import moving_seconds
from autopar.passes.cost.devices import Device, Link
from autopar.runtime.agree import PATIENCE
from autopar.runtime.board import board_of
from autopar.runtime.measure import Meter
from autopar.runtime.measure_ops import draw_seconds, measured_shares, stream_curve
from autopar.runtime.measure_rates import memory_rates
from autopar.runtime.sum_on_boards import SmallSum

_ops = torch.ops._c10d_functional

PRODUCT_SIZES = ((64, 64, 64), (256, 256, 256), (512, 64, 512), (1024, 1024, 1024), (2048, 128, 2048))
"""``m, n, k`` of the products measured first; larger ones follow until one takes ``LONG_S``."""

LONG_S = 0.05
CALLS = 100
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MESSAGE_BYTES = tuple(2**power for power in range(10, 27, 2))
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LARGEST_SIDE = 16384
MET_BYTES = 2**16
HIDDEN_BYTES = 2**21
"""Of the collective that is watched while it hides behind compute."""


def calibrate(device: torch.device | str = "cpu", *, budget_s: float = 60.0) -> dict[str, Any]:
    """Return the profile of this machine: ``device``, ``links`` and the ``measurements`` behind them.

    Every rank of the default process group calls it; without one only the device is measured, and the link of the
    ``cpu`` profile stands in.

    Args:
        device: where tensors lie.
        budget_s: seconds that products and collectives may take, each about half.
    """
    where = torch.device(device)
    meter = Meter(where)
    meter.observe()
    products = _products(meter, budget_s / 2)
    figures = _measured_figures(meter)
    meter.observe()
    moves = _collectives(meter, budget_s / 2) if meter.num_ranks > 1 else []
    meter.observe()
    profile = _device_profile(where, products, figures, meter.slowdown)
    measured: dict[str, Any] = {"products": products, "slowdown": meter.slowdown}
    links: dict[str, Any] = {}
    if moves:
        measured["collectives"] = moves
        links["group"] = _link_profile(moves, meter.num_ranks, _priced_on(profile))
        waits = {"meet_s": _meet_seconds(meter), "few_s": _few_seconds(meter)}
        known = {name: seconds for name, seconds in waits.items() if seconds is not None}
        links["group"] |= known
        links["group"]["sources"] |= dict.fromkeys(known, links["group"]["sources"]["call_s"])
        profile["devices_per_node"] = meter.num_ranks
        profile["contention"] = meter.contention(partial(_start_collective, meter.device))
        profile["sources"]["contention"] = profile["sources"]["launch_s"]
    return {"device": profile, "links": links, "measurements": measured}


def calibrate_processes(device: str, budget_s: float, path: str) -> str | None:
    """Measure on every process that ``torchrun`` started, or on this one; the first writes the profile to ``path``.

    Returns:
        What was found, in words, on the first process; None on the others.

    Raises:
        OptionError: the device or the budget is impossible, or the file can't be written.
    """
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise OptionError(f"calibrate measures cpu or cuda; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("calibrate was asked to measure cuda, but torch sees no CUDA device; use cpu")
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise OptionError(f"calibrate needs a positive number of seconds; got {budget_s!r}")
    started = "RANK" in os.environ and not dist.is_initialized()
    where = device
    if device == "cuda":
        where = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(where)
    if started:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        profile = name_links(calibrate(where, budget_s=budget_s), path)
        first = not dist.is_initialized() or dist.get_rank() == 0
    finally:
        if started:
            dist.destroy_process_group()
    if not first:
        return None
    try:
        Path(path).write_text(json.dumps(profile, indent=1) + "\n")
    except OSError as error:
        raise OptionError(f"the profile can't be written to {path}: {error.strerror}") from None
    return describe(profile, path)


def describe(profile: dict[str, Any], path: str) -> str:
    """Return a profile in a few lines."""
    figures = profile["device"]
    lines = [f"{figures['description']}, written to {path}"]
    lines += [f"  {name:10} {peak / 1e9:12,.1f} GFLOP/s" for name, peak in figures["peak_flops"].items()]
    lines.append(
        f"  memory     {figures['memory_bytes_per_s'] / 1e9:12,.1f} GB/s, launch {figures['launch_s'] * 1e6:.1f} us"
    )
    for link in profile["links"].values():
        lines.append(
            f"  link       {link['bytes_per_s'] / 1e9:12,.2f} GB/s, step {link['latency_s'] * 1e6:.0f} us, "
            f"call {link['call_s'] * 1e6:.0f} us, ranks come apart by {link['meet_s'] * 1e6:.0f} us"
            + (f", a few numbers {link['few_s'] * 1e6:.0f} us" if "few_s" in link else "")
            + f" ({link['description']})"
        )
    return "\n".join(lines)


def _priced_on(profile: dict[str, Any]) -> Device:
    names = {field.name for field in fields(Device)}
    return Device("here", **{key: value for key, value in profile.items() if key in names})


def name_links(profile: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the profile with its device's links named by the file that will hold them."""
    name = f"{path}:group" if profile["links"] else "shared_memory"
    return {**profile, "device": {**profile["device"], "link_inside": name, "link_between": name}}


def _products(meter: Meter, budget_s: float) -> list[dict[str, Any]]:
    """Return a row a product measured: dtype, sizes, seconds, flops a second."""
    out = []
    for name, dtype in DTYPES.items():
        begin = time.perf_counter()
        sizes = list(PRODUCT_SIZES)
        for m, n, k in sizes:
            if time.perf_counter() - begin > budget_s / len(DTYPES):
                break
            a, b = (torch.ones(shape, dtype=dtype, device=meter.device) for shape in ((m, k), (k, n)))
            seconds = meter.seconds(lambda a=a, b=b: a @ b, budget_s / 10)  # type: ignore[misc]
            out.append({"dtype": name, "m": m, "n": n, "k": k, "s": seconds, "flops_per_s": 2 * m * n * k / seconds})
            longest = min(LONG_S, budget_s / 100)
            if (m, n, k) == sizes[-1] and seconds < longest and m < LARGEST_SIDE:
                sizes.append((2 * max(m, n), 2 * max(m, n), k))
    return out


def _measured_figures(meter: Meter) -> dict[str, Any]:
    """Return what small ops, streams, attention, convolution and random numbers take, as a profile's figures."""
    one = torch.ones(1, device=meter.device)
    launch_s = meter.seconds(lambda: [torch.add(one, 1) for _ in range(CALLS)], 1.0) / CALLS
    curve = stream_curve(meter, launch_s)
    figures: dict[str, Any] = {"launch_s": launch_s, "memory_bytes_per_s": curve[-1][1]}
    if meter.device.type == "cpu":
        figures["view_s"] = meter.seconds(lambda: [one.view(1, 1) for _ in range(CALLS)], 1.0) / CALLS
        figures["stream_curve"] = curve
        figures["draw_s"] = draw_seconds(meter)
        figures["attention_flops_per_s"], figures["convolution_flops_per_s"] = measured_shares(meter)
        figures["memory_rates"] = memory_rates(meter)
    return figures


def _device_profile(
    device: torch.device, products: list[dict[str, Any]], measured: dict[str, Any], slowdown: float
) -> dict[str, Any]:
    """Return the profile of the device; rates and seconds are those of the wall clock while all ranks compute."""
    best: dict[str, float] = {}
    for row in products:
        best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row["flops_per_s"] / slowdown)
    best.setdefault("float32", max(best.values()))
    best["float64"] = best["float32"] / 2
    units, memory = 1, _memory_bytes()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        units, memory = properties.multi_processor_count, properties.total_memory
    source = f"measured by autopar calibrate on {platform.node() or 'a machine'}, torch {torch.__version__}"
    figures: dict[str, Any] = {
        "peak_flops": dict(sorted(best.items())),
        "achievable": 1.0,
        "memory_bytes_per_s": measured["memory_bytes_per_s"] / slowdown,
        "memory_achievable": 1.0,
        "launch_s": measured["launch_s"] * slowdown,
        "memory_bytes": memory,
        "num_units": units,
        "fuses": device.type == "cuda",
        "devices_per_node": 1024 if device.type == "cpu" else torch.cuda.device_count(),
        "link_inside": "shared_memory",
        "link_between": "shared_memory",
    }
    if "view_s" in measured:
        rate = best["float32"] * slowdown
        kinds = {kind: measured[f"{kind}_flops_per_s"] / rate for kind in ("attention", "convolution")}
        rates: dict[str, tuple[float, float, float]] = measured["memory_rates"]
        figures |= {
            "view_s": measured["view_s"] * slowdown,
            "draw_s": measured["draw_s"] * slowdown,
            "shares": kinds,
            "calls": {op: call_s * slowdown for op, (call_s, _, _) in rates.items()},
            "stream_curve": [[size, speed / slowdown] for size, speed in measured["stream_curve"]],
        }
        stream = _priced_on(figures)
        for op, (_, num_bytes, seconds) in rates.items():
            kinds[op] = float(stream.stream_seconds(num_bytes)) / (seconds * slowdown)
    return {
        "description": f"{device.type} of {platform.machine()}",
        **figures,
        "sources": dict.fromkeys(figures, source),
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _collectives(meter: Meter, budget_s: float) -> list[dict[str, Any]]:
    """Return a row a collective and size measured: kind, bytes of the whole tensor, seconds."""
    out = []
    world = meter.num_ranks
    dist.barrier()
    begin = time.perf_counter()
    for size in MESSAGE_BYTES:
        for kind in KINDS:
            x = torch.ones(max(world, size // 4 // world * world), device=meter.device)
            work = partial(_run_collective, kind, x if kind != "all_gather" else x[: x.numel() // world].clone(), world)
            out.append({"kind": kind, "bytes": x.numel() * 4, "s": meter.collective_seconds(work)})
        if meter.any(time.perf_counter() - begin > budget_s):
            break
    return out


def _run_collective(kind: str, x: torch.Tensor, world: int) -> torch.Tensor:
    """Run one collective as lowered programs do."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    if kind == "all_reduce":
        out = _ops.all_reduce(x, "sum", name)
    elif kind == "all_gather":
        out = _ops.all_gather_into_tensor(x, world, name)
    elif kind == "reduce_scatter":
        out = _ops.reduce_scatter_tensor(x, "sum", world, name)
    else:
        split = [x.numel() // world] * world
        out = _ops.all_to_all_single(x, split, split, name)
    return _ops.wait_tensor(out)  # type: ignore[no-any-return]


def _start_collective(device: torch.device) -> torch.Tensor:
    """Start one collective; what it returns is to be waited for."""
    x = torch.ones(HIDDEN_BYTES // 4, device=device)
    return _ops.all_reduce(x, "sum", dist.group.WORLD.group_name)  # type: ignore[no-any-return,union-attr]


def _meet_seconds(meter: Meter) -> float:
    """Return what who waits for a collective pays for ranks that have come apart."""
    x = torch.ones(max(meter.num_ranks, MET_BYTES // 4 // meter.num_ranks * meter.num_ranks), device=meter.device)
    return meter.meet_seconds(partial(_run_collective, "all_reduce", x, meter.num_ranks))


def _few_seconds(meter: Meter) -> float | None:
    """Return the seconds of a sum of a few numbers through memory that ranks share; None where they share none."""
    group = dist.group.WORLD
    assert group is not None
    board = board_of(group, PATIENCE) if meter.device.type == "cpu" else None
    if board is None:
        return None
    number = torch.ones(())
    small = SmallSum(board, 0, number)
    return meter.collective_seconds(lambda: small.total(small.post(number)))


def _link_profile(moves: list[dict[str, Any]], world: int, device: Device) -> dict[str, Any]:
    """Fit step, bandwidth and call to the measured collectives, by the relative error of their prices."""
    sizes = {kind: np.array([row["bytes"] for row in moves if row["kind"] == kind]) for kind in KINDS}
    times = {kind: np.array([row["s"] for row in moves if row["kind"] == kind]) for kind in KINDS}

    def error(logs: np.ndarray[Any, Any]) -> float:
        latency_s, bytes_per_s, call_s = (float(figure) for figure in np.exp(logs))
        wire = Link("fit", latency_s, bytes_per_s, call_s)
        parts = [
            np.abs(np.log(_priced(kind, world, sizes[kind], wire, device) / times[kind]))
            for kind in KINDS
            if len(sizes[kind])
        ]
        return float(np.mean(np.concatenate(parts)))

    least = min(row["s"] for row in moves)
    fastest = max(row["bytes"] / row["s"] for row in moves)
    start = np.log([least / 4 / world, fastest, least / 2])
    best = minimize(error, start, method="Nelder-Mead", options={"maxiter": 2000, "xatol": 1e-4, "fatol": 1e-6})
    latency_s, bytes_per_s, call_s = (float(figure) for figure in np.exp(best.x))
    figures = {"latency_s": latency_s, "bytes_per_s": bytes_per_s, "call_s": call_s, "shared": False}
    source = f"fitted by autopar calibrate to {len(moves)} collectives of {world} processes over {dist.get_backend()}"
    note = f"{dist.get_backend()}, {world} processes; prices differ from the times by {best.fun:.0%} in the mean"
    return {"description": note, **figures, "sources": dict.fromkeys(figures, source)}


def _priced(kind: str, world: int, size: Any, wire: Link, device: Device) -> Any:
    handed_in = size / world if kind == "all_gather" else size
    return moving_seconds(kind, world, handed_in, 0, 0, wire, device)
