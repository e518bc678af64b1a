"""The search over a cluster: its best is the best of all candidates, and what practitioners know comes out."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.errors import InfeasibleError, OptionError
from autopar.mesh import Mesh
from autopar.passes import search_cluster
from autopar.passes.candidates import Candidate, Limits, candidates
from autopar.passes.hardware import Hardware
from autopar.passes.price_regions import PricedRegion, Work
from autopar.passes.schedules import make_schedule
from autopar.passes.search_cluster import ClusterSearcher, Found, hardware_conditions
from autopar.passes.solve.stages import place_stages

TOKENS = 2048
HIDDEN = 4096


def layer(mesh: Mesh, samples: int, hidden: int, kind: int, name: str) -> PricedRegion:
    """Return a layer of 12 hidden^2 parameters split over the mesh, with two reductions forward and two backward."""
    ranks = mesh.num_ranks
    numel = 12 * hidden * hidden // ranks
    flops = 2.0 * numel * samples * TOKENS
    work = Work(products=flops / 600e12)
    size = 2 * samples * TOKENS * hidden
    moves = Work(moves=0.0 if ranks == 1 else 2 * (2 * size * (ranks - 1) / ranks / _speed(mesh) + 3e-5))
    light = Work(streams=8 * size / ranks / 2.5e12)
    parameters = ((numel, 2, True),)
    saved = (34 * size // 2 // ranks, 20 * size // 2 // ranks)
    return PricedRegion(name, kind, work + moves, work + moves, work, light, parameters, *saved, size // ranks, size)


def _speed(mesh: Mesh) -> float:
    inside = mesh.links[0] in ("nvlink4", "nvlink3")
    return 3e11 if inside else 4e10


def model(num_layers: int, hidden: int = HIDDEN):  # type: ignore[no-untyped-def]
    """Return what prices a stack of layers between an embedding and a head."""

    def price(mesh: Mesh, samples: int) -> tuple[PricedRegion, ...]:
        middle = layer(mesh, samples, hidden, 1, "layer")
        none = Work()
        embedding = dataclasses.replace(middle, name="embedding", kind=0, forward=none, input=none, again=none)
        head = dataclasses.replace(middle, name="head", kind=2, send_bytes=0)
        return (embedding, *[middle] * num_layers, head)

    return price


def searcher(
    hardware: Hardware, batch: int, num_layers: int, *, hidden: int = HIDDEN, budget: int = int(74e9), **limits: object
) -> ClusterSearcher:
    """Return a search for a stack of layers."""
    conditions = hardware_conditions(hardware, "adamw")
    return ClusterSearcher(
        hardware,
        batch,
        model(num_layers, hidden),
        num_layers + 2,
        conditions,
        budget,
        Limits(**limits),  # type: ignore[arg-type]
    )


def names(search: ClusterSearcher, found: Found) -> set[str]:
    """Return the names of the variants that a configuration uses."""
    regions = search.regions(found.candidate)
    return {region.variants[v].name for region, v in zip(regions, found.placement.variants, strict=True)}


FAST = Hardware(2, 2, "h100", "nvlink4", "infiniband_400")
SLOW = Hardware(4, 8, "h100", "nvlink4", "ethernet_10")


@pytest.mark.parametrize("budget", [30e9, 8e9])
def test_best_of_all_candidates(budget: float) -> None:
    """Pruning by bounds loses nothing: every candidate placed exactly by the integer program gives the same best."""
    search = searcher(FAST, 8, 4, budget=int(budget), schedules=("1f1b", "interleaved_1f1b"))
    found = search.search(slack=0.0, exact_regions=8)
    best = min(
        placed.makespan_s
        for candidate in candidates(FAST, 8, 6, search.limits)
        if (placed := _exact(search, candidate)) is not None
    )
    assert found.best.step_s == pytest.approx(best, rel=1e-6)
    assert found.status == "optimal"
    assert found.considered == found.pruned + found.solved
    assert found.pruned > 0 < found.solved


def _exact(search: ClusterSearcher, candidate: Candidate):  # type: ignore[no-untyped-def]
    schedule = make_schedule(candidate.schedule, candidate.stages, candidate.micro_batches, candidate.chunks)
    try:
        return place_stages(search.regions(candidate), schedule, search.budget)
    except InfeasibleError:
        return None


def test_what_is_not_placed_is_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few actions for all tables candidates are left, counted, and the bound is no higher than theirs."""
    every = searcher(FAST, 16, 14).search(most_programs=0)
    assert every.left == 0
    monkeypatch.setattr(search_cluster, "MOST_ACTIONS", 50)
    search = searcher(FAST, 16, 14)
    found = search.search(most_programs=0)
    assert found.left > 0
    assert found.considered == found.pruned + found.solved + found.left
    assert found.bound_s <= every.best.step_s <= found.best.step_s


def test_fits_one_node_is_data_parallel() -> None:
    """A model that fits every device of one fast node is not cut: data parallel or ZeRO-1/2, no tensor split."""
    found = (
        searcher(Hardware(1, 8, "h100", "nvlink4", "infiniband_400"), 64, 8, hidden=2048)
        .search(most_programs=0)
        .best.candidate
    )
    assert (found.stages, found.data, found.inner) == (1, 8, ())


def test_one_device_splits_nothing() -> None:
    """On one device there are no stages and no axes."""
    search = searcher(Hardware(1, 1, "h100", "nvlink4", "infiniband_400"), 8, 4, hidden=2048)
    found = search.search(most_programs=0).best
    assert (found.candidate.stages, found.candidate.data, found.candidate.inner) == (1, 1, ())
    assert names(search, found) <= {"kept", "light again", "full again"}


def test_fast_network_is_zero3_or_three_dimensional() -> None:
    """On a fast network a model that fits no device gets ZeRO-3, or stages, tensor and data splits together."""
    hardware = Hardware(8, 8, "h100", "nvlink4", "infiniband_400")
    search = searcher(hardware, 256, 62, hidden=8192, micro_batch=(1, 2), schedules=("1f1b", "interleaved_1f1b"))
    best = search.search(most_programs=0).best
    split = (best.candidate.stages > 1, best.candidate.data > 1, best.candidate.inner != ())
    assert any("zero3" in name for name in names(search, best)) or sum(split) >= 2


def test_micro_batches_make_the_bubble_small() -> None:
    """With one stage a rank there are four micro-batches a stage or more; interleaved stages may do with fewer."""
    hardware = Hardware(4, 8, "h100", "nvlink4", "infiniband_400")
    limits = {"micro_batch": (1, 2, 4), "stages": (4,), "inner": ((8,),)}
    found = searcher(hardware, 64, 30, hidden=8192, schedules=("1f1b",), **limits).search(most_programs=0).best
    assert found.candidate.micro_batches >= 4 * found.candidate.stages
    assert found.placement.simulation.bubble_share < 0.2
    either = searcher(hardware, 64, 30, hidden=8192, schedules=("1f1b", "interleaved_1f1b"), **limits)
    better = either.search(most_programs=0).best
    assert better.step_s <= found.step_s
    assert better.candidate.chunks > 1 or better.candidate.micro_batches >= 4 * better.candidate.stages


def test_slow_network_keeps_tensor_splits_inside() -> None:
    """Over 10 Gb between nodes a large model gets stages across nodes, and no tensor split leaves a node."""
    limits = {"micro_batch": (1, 2), "schedules": ("1f1b", "interleaved_1f1b")}
    search = searcher(SLOW, 64, 30, hidden=8192, **limits)
    best = search.search(most_programs=0).best
    found = best.candidate
    assert found.stages > 1
    assert found.stages * found.data * max(1, *found.inner, 1) == 32
    assert all(size <= 8 for size in found.inner)
    # parameters gathered for every micro-batch stay inside a node
    inside = SLOW.links(found.sizes)[1] == SLOW.link_inside
    assert inside or not any("zero3" in name for name in names(search, best))


def test_slow_network_has_zero1_across_nodes() -> None:
    """With more nodes than stages the data axis crosses them over 10 Gb: ZeRO-1, whose gradients cross once a step."""
    hardware = Hardware(16, 8, "h100", "nvlink4", "ethernet_10")
    search = searcher(hardware, 1024, 14, hidden=8192, micro_batch=(1, 2), schedules=("1f1b",))
    best = search.search(most_programs=0).best
    candidate = best.candidate
    assert candidate.stages > 1 and candidate.data > hardware.devices_per_node and candidate.micro_batches > 1
    assert all(size <= hardware.devices_per_node for size in candidate.inner)
    variants = names(search, best)
    assert variants and all(name.split(" + ")[0] in ("zero0", "zero1") for name in variants)
    assert any(name.startswith("zero1") for name in variants)


def test_many_devices_are_three_dimensional() -> None:
    """On thousands of devices stages, data and tensor splits together beat ZeRO-3 alone."""
    hardware = Hardware(256, 8, "h100", "nvlink4", "infiniband_400")
    search = searcher(hardware, 2048, 62, hidden=12288, micro_batch=(1,), schedules=("interleaved_1f1b",))
    found = search.search(most_programs=0)
    alone = search.place(Candidate(1, 2048, (), 1, 1))
    assert found.best.candidate.stages * max(1, *found.best.candidate.inner, 1) > 1
    assert alone is None or found.best.step_s < alone.step_s


def test_time_does_not_depend_on_the_number_of_devices() -> None:
    """Regions are priced once for each shape inside a stage and micro-batch, however many devices there are."""
    counts = []
    for nodes in (16, 256):
        search = searcher(
            Hardware(nodes, 8, "h100", "nvlink4", "infiniband_400"),
            8 * nodes,
            14,
            micro_batch=(1,),
            schedules=("1f1b",),
        )
        search.search(most_programs=0)
        counts.append(len(search.priced))
    assert counts[0] == counts[1]


def test_refusals() -> None:
    """A batch that nothing divides and a model that nothing holds are said with what would do."""
    with pytest.raises(OptionError, match="no mesh of 2x2 h100 divides a batch of 7"):
        searcher(FAST, 7, 6, stages=(1,), inner=((),)).search()
    with pytest.raises(InfeasibleError, match=r"fits into 0.1 GB a device on 2x2 h100; .* so about \d+ such devices"):
        searcher(FAST, 16, 6, budget=int(1e8)).search()


def test_bounds_hold() -> None:
    """No candidate's placement is faster than its bound."""
    search = searcher(FAST, 16, 6, budget=int(40e9))
    tried = 0
    for candidate in candidates(FAST, 16, 8, search.limits):
        found = search.place(candidate)
        if found is not None:
            tried += 1
            assert search.bound(candidate, search.regions(candidate)) <= found.step_s * (1 + 1e-9)
            assert found.placement.bound_s <= found.step_s * (1 + 1e-9)
    assert tried > 20


def test_what_does_not_fit_one_device_is_split() -> None:
    """On one node a model that does not fit a device gets a tensor split, stages or ZeRO-3, and fits."""
    search = searcher(Hardware(1, 8, "h100", "nvlink4", "infiniband_400"), 64, 14, hidden=8192, budget=int(40e9))
    best = search.search(most_programs=0).best
    split = best.candidate.inner or best.candidate.stages > 1
    assert split or any("zero3" in name for name in names(search, best))
    assert max(best.placement.simulation.peak_bytes) <= 40e9
