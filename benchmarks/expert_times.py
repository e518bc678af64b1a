"""Seconds of routed experts in one layer on a rank: router, dispatch, products of groups, the exchange of rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import lru_cache
from math import comb

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.collectives import all_gather_seconds, reduce_scatter_seconds
from autopar.passes.cost.devices import Device, Link, axis_links, device, link
from autopar.passes.fold import fold
from autopar.passes.program import Program
from autopar.passes.solve.layout_graph import Prices
from benchmarks.layer_times import Part, Seconds, computing, parts_from, tally, tensor_dtype
from benchmarks.models.routed import RoutedConfig, build
from benchmarks.published_runs import Run
from benchmarks.run_links import inside_link, network, node_size


def routed_config(run: Run) -> RoutedConfig:
    """Return the sizes of a rank's part: its tokens, and as many rows as it sends, for loads are balanced.

    Ranks that share an expert gather the rows of each other.
    """
    assert run.experts is not None
    experts, model = run.experts, run.model
    tokens = run.micro_batch * model.sequence // run.tp
    rows = -(-tokens * experts.top_k * experts.etp // experts.local) * experts.local
    return RoutedConfig(
        tokens=tokens,
        rows=rows,
        hidden=model.hidden,
        ffn=experts.ffn // experts.etp,
        experts=experts.num,
        local=experts.local,
        top_k=experts.top_k,
        gated=model.gated,
        norm=not experts.shared,
    )


@lru_cache(maxsize=4)
def captured_routed(config: RoutedConfig, dtype: str) -> tuple[Program, dict[str, str]]:
    """Return the annotated program of two layers of experts, and which of its ops are alike."""
    model, args = build(config, tensor_dtype(dtype))
    program = annotate(capture(model, args, {}))
    return program, fold(program).class_of


@lru_cache(maxsize=4096)
def routed_part(config: RoutedConfig, dtype: str, name: str, fused: bool, narrow: str = "") -> Part:
    """Return the routed experts of one layer on one device; arguments as of ``layer_times.parts_of``."""
    program, classes = captured_routed(config, dtype)
    prices = Prices.of(Mesh((1,), ("model",), name, (device(name).link_inside,)))
    prices = dataclasses.replace(prices, device=computing(name, dtype))
    seconds: Seconds = defaultdict(float)
    tally(seconds, program, classes, prices, computing(name, narrow) if narrow else None, fused=fused)
    part = parts_from(seconds, {True: 2.0 * config.hidden * config.experts})[0]
    count = (3 if config.gated else 2) * config.local * config.hidden * config.ffn
    return dataclasses.replace(part, experts=float(count))


def reached(groups: int, experts: int, top_k: int) -> float:
    """Return how many of ``groups`` equal groups of experts a token's experts lie in, on average.

    >>> reached(8, 128, 1)
    1.0
    >>> reached(2, 4, 2)  # both in one group: 2 of 6 pairs
    1.6666666666666667
    """
    return groups * (1.0 - comb(experts - experts // groups, top_k) / comb(experts, top_k))


def exchanged_bytes(run: Run, nodes: int) -> tuple[float, float]:
    """Return the bytes that a rank sends inside its node and to other nodes, to bring each row to its expert.

    Every row travels alone, or a token once to each node over the network and from there once to each rank.
    """
    assert run.experts is not None
    experts = run.experts
    token = 2.0 * run.model.hidden * run.micro_batch * run.model.sequence / run.tp
    if not experts.once or experts.num % nodes:
        ranks = float(experts.top_k)
        return token * ranks / nodes * (1.0 - nodes / experts.ep), token * ranks * (1.0 - 1.0 / nodes)
    ranks, hosts = reached(experts.ep, experts.num, experts.top_k), reached(nodes, experts.num, experts.top_k)
    return token * ranks * (1.0 - nodes / experts.ep), token * hosts * (1.0 - 1.0 / nodes)


def exchange_seconds(run: Run) -> float:
    """Return the seconds of one exchange of rows over the expert-parallel group, in one direction.

    Ranks that share an expert gather each other's rows besides, or scatter the sums of their results.
    """
    assert run.experts is not None
    experts, profile = run.experts, device(run.device)
    seconds = 0.0
    if experts.ep > 1:
        seconds = _all_to_all(run, expert_link(run, experts.ep, experts.etp), profile)
    if experts.etp > 1:
        at = expert_link(run, experts.etp, 1)
        num_bytes = 2.0 * run.model.hidden * run.micro_batch * run.model.sequence / run.tp * experts.top_k
        ways = (
            all_gather_seconds(experts.etp, num_bytes, 0, at, profile),
            reduce_scatter_seconds(experts.etp, num_bytes * experts.etp, 0, at, profile),
        )
        seconds += float(sum(ways)) / 2
    return seconds


def expert_link(run: Run, ranks: int, stride: int) -> Link:
    """Return the link of ``ranks`` ranks that lie ``stride`` apart."""
    return link(axis_links((ranks, stride), node_size(run), inside_link(run, ranks), network(run))[0])


def _all_to_all(run: Run, at: Link, profile: Device) -> float:
    """Return the seconds of sending rows to each other rank: inside the node and over its ports at the same time.

    NCCL sends to one rank after another; kernels that send a token once reach all at the same time.
    """
    assert run.experts is not None
    ranks, once = run.experts.ep, run.experts.once
    inside = min(at.ranks_inside if at.inner is not None else ranks, ranks)
    spans = at.inner is not None or at.name == network(run)
    nodes = -(-ranks // inside) if at.inner is not None else ranks if spans else 1
    within, across = exchanged_bytes(run, nodes)
    inner = at.inner or at
    steps_s = inner.latency_s + (at.latency_s if spans else 0.0)
    if not once:
        steps_s = (inside - 1) * inner.latency_s + (ranks - inside) * at.latency_s
    port = at.bytes_per_s / at.ranks_inside
    return max(within / inner.bytes_per_s, across / port) + steps_s + at.call_s + profile.launch_s


KERNELS = {"": (2, 4), "float8_e4m3fn": (4, 6), "float4_e2m1fn_x2": (4, 6)}
"""Kernels for each expert, forward and backward, by the dtype of products: two products and twice two, and where they
are narrow the casts of what goes in and of the gradients."""

BLOCK_KERNELS = (4, 8)
"""Kernels that bring the scales of blocks into the order of the products, two a product."""


def group_seconds(run: Run, is_backward: bool) -> float:
    """Return the seconds in which one layer starts the kernels of single experts."""
    assert run.experts is not None
    if run.experts.fused:
        return 0.0
    count = KERNELS[run.narrow][is_backward] + (BLOCK_KERNELS[is_backward] if run.block_scales else 0)
    return run.experts.local * count * device(run.device).launch_s


def copies_seconds(run: Run) -> float:
    """Return the seconds of the copies that sort rows by expert after an exchange, or back before one.

    Dispatchers that send a token once write rows where they belong.
    """
    assert run.experts is not None
    experts = run.experts
    if experts.once or experts.local == 1:
        return 0.0
    rows = run.micro_batch * run.model.sequence / run.tp * experts.top_k * experts.etp
    return 4.0 * rows * run.model.hidden / device(run.device).stream_bytes_per_s
