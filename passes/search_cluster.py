"""Search a cluster: how many stages, which schedule, how many micro-batches, and the shape of the mesh in a stage.

Every candidate has a lower bound that costs next to nothing. Candidates are tried in the order of an estimate; one
whose bound is no less than the best makespan so far is pruned, the others are placed. What is left over at the end
proves how far the best can be from the optimum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, OptionError
from autopar.mesh import Mesh

from .candidates import Candidate, Limits, candidates
from .cost.devices import device, link
from .hardware import Hardware
from .price_regions import PricedRegion
from .region_variants import Conditions, region_variants
from .schedules import make_schedule
from .solve.branch_stages import branch_stages, relaxed_bound
from .solve.stage_bounds import Bounds
from .solve.stage_records import Region, Variant
from .solve.stages import Placement, place_stages, quick_stages

Price = Callable[[Mesh, int], tuple[PricedRegion, ...]]
"""Prices the regions on the mesh inside a stage, for so many samples a micro-batch."""

MOST_PROGRAMS = 1500
"""Linear programs at most for the cuts of one candidate."""

FIRST_PROGRAMS = 100
"""Of these, at most so many before all other candidates had their turn."""

MOST_ACTIONS = 4_000_000
"""Actions of all the tables that a search makes: after that it places no more, and says so by its gap."""

LONG = 1500.0
"""Actions of a table above which a program for its cuts counts for more than one."""

MOST_EXACT = 12
"""Regions up to which placements are made exact by the integer program."""

SPARE = 0.92
"""The part of a device's memory that a plan may fill when nothing else is asked: the rest is the runtime's own."""


@dataclass(frozen=True)
class Found:
    """A candidate with its placement."""

    candidate: Candidate
    placement: Placement

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.placement.makespan_s


@dataclass(frozen=True)
class ClusterSearch:
    """What a search found.

    Attributes:
        best: the fastest.
        considered, pruned, solved, left: candidates: all, those left out by a bound, those placed, and those that were
            not, after ``MOST_ACTIONS``: their bounds are in ``bound_s``.
        bound_s: no candidate is faster.
        ranked: the best of each shape, the fastest first.
        slack: a difference below this part of a step was not looked for.
    """

    best: Found
    considered: int
    pruned: int
    solved: int
    bound_s: float
    ranked: tuple[Found, ...] = ()
    slack: float = 0.0
    left: int = 0

    @property
    def gap(self) -> float:
        """Relative distance of the bound."""
        return max(0.0, self.best.step_s - self.bound_s) / self.best.step_s

    @property
    def status(self) -> str:
        """``optimal`` when it is proved that no candidate is faster by more than ``slack``, else ``feasible``."""
        return "optimal" if self.gap <= self.slack + 1e-6 else "feasible"


@dataclass(eq=False)
class ClusterSearcher:
    """A search over one cluster.

    Args:
        hardware: the cluster.
        batch: samples of a step.
        price: prices regions.
        num_regions: of the model.
        conditions: what all candidates share; its data axis, links and micro-batches are filled in.
        budget: bytes of a rank.
        limits: what may be chosen.
    """

    hardware: Hardware
    batch: int
    price: Price
    num_regions: int
    conditions: Conditions
    budget: int
    limits: Limits = field(default_factory=Limits)
    priced: dict[tuple[tuple[int, ...], int], tuple[PricedRegion, ...]] = field(default_factory=dict)
    made: dict[tuple[tuple[int, ...], int], tuple[Region, ...]] = field(default_factory=dict)

    def regions(self, candidate: Candidate) -> tuple[Region, ...]:
        """Return the regions of a candidate with their variants."""
        same = (candidate.sizes, candidate.micro_batch)
        if same not in self.made:
            self.made[same] = self._regions(candidate)
        return self.made[same]

    def _regions(self, candidate: Candidate) -> tuple[Region, ...]:
        key = (candidate.inner, candidate.micro_batch)
        links = self.hardware.links(candidate.sizes)
        if key not in self.priced:
            sizes = candidate.inner or (1,)
            names = ("inner",) if len(sizes) == 1 else tuple(f"inner{at}" for at in range(len(sizes)))
            mesh = Mesh(sizes, names, self.hardware.device, links[2:] or (self.hardware.link_inside,))
            self.priced[key] = self.price(mesh, candidate.micro_batch)
        conditions = replace(
            self.conditions,
            data=candidate.data,
            data_link=link(links[1]),
            stage_link=link(links[0]),
            micro_batches=candidate.micro_batches,
        )
        return region_variants(self.priced[key], conditions)

    def bound(self, candidate: Candidate, regions: Sequence[Region]) -> float:
        """Return a lower bound on a candidate's makespan; infinite when nothing fits.

        A rank's share of the work; the way of one micro-batch there and back; or all forwards of one micro-batch, which
        every backward waits for, and then a rank's share of all backwards.
        """
        number, stages = candidate.micro_batches, candidate.stages
        kinds = Counter(region.variants for region in regions)
        state = sum(count * min(v.state_bytes for v in kind) for kind, count in kinds.items())
        if state > self.budget * stages:
            return math.inf
        share = sum(count * min(_work(v, number) + v.step_s for v in kind) for kind, count in kinds.items()) / stages
        if stages == 1:
            return share
        ways = (
            sum(count * min(v.forward_s + v.input_s for v in kind) for kind, count in kinds.items()),
            sum(
                count * min(v.forward_s + number * (v.input_s + v.weight_s) / stages for v in kind)
                for kind, count in kinds.items()
            ),
        )
        if candidate.chunks > 1:
            return max(share, *ways)
        turned = sum(
            count * min(_turned(v, candidate.schedule, number, stages) for v in kind) for kind, count in kinds.items()
        )
        return max(share, turned, *ways)

    def place(self, candidate: Candidate) -> Found | None:
        """Return a candidate's placement; None when none was found that fits."""
        return self._place(candidate, 0.0, math.inf)[1]

    def _place(self, candidate: Candidate, low_s: float, enough_s: float) -> tuple[float, Found | None]:
        """Return a bound and, unless that is no less than ``enough_s``, a placement if one was found that fits."""
        regions = self.regions(candidate)
        schedule = make_schedule(candidate.schedule, candidate.stages, candidate.micro_batches, candidate.chunks)
        bounds = Bounds(regions, schedule, self.budget, self.limits.pinned)
        low_s = max(low_s, bounds.bound_s())
        if low_s < enough_s < math.inf and schedule.chunks > 1 and self.num_regions > MOST_EXACT:
            low_s = max(low_s, relaxed_bound(regions, schedule, self.budget))
        if low_s >= enough_s:
            return low_s, None
        placement = quick_stages(regions, schedule, self.budget, pinned=self.limits.pinned, bounds=bounds)
        return low_s, Found(candidate, placement) if placement is not None else None

    def search(
        self, *, slack: float | None = None, exact_regions: int = MOST_EXACT, most_programs: int = 2000
    ) -> ClusterSearch:
        """Return the fastest candidate.

        Args:
            slack: a candidate that can't be better by more than this part of the best is left out; by default 0
                where placements are made exact, else 0.005.
            exact_regions: up to so many regions the best placements are made exact by the integer program.
            most_programs: for deeper models, how many linear programs may be solved to raise bounds; large ones
                count for several.

        Raises:
            OptionError: there is no candidate: the batch, the stages or the limits do not divide.
            InfeasibleError: nothing fits the budget; it names the least that does.
        """
        if slack is None:
            slack = 0.0 if self.num_regions <= exact_regions else 0.005
        waiting = self._ordered()
        if not waiting:
            raise OptionError(
                f"no mesh of {self.hardware} divides a batch of {self.batch} as asked ({self.limits}); change the "
                "batch, or allow more stages, micro-batches or inner sizes"
            )
        best: Found | None = None
        solved: list[tuple[float, Found]] = []
        unplaced: list[tuple[float, Candidate]] = []
        pruned, left, actions, floor_s = 0, 0, 0, math.inf
        for _, bound_s, candidate in waiting:
            enough_s = best.step_s * (1.0 - slack) if best else math.inf
            found = None
            if bound_s < enough_s and best and actions + candidate.num_actions > MOST_ACTIONS:
                left, floor_s = left + 1, min(floor_s, bound_s)
                continue
            if bound_s < enough_s:
                actions += candidate.num_actions
                bound_s, found = self._place(candidate, bound_s, enough_s)
            if found is None:
                pruned += 1
                if bound_s < enough_s:
                    unplaced.append((bound_s, candidate))
                else:
                    floor_s = min(floor_s, bound_s)
                continue
            solved.append((max(bound_s, found.placement.bound_s), found))
            if best is None or found.step_s < best.step_s:
                best = found
        if best is None:
            raise self._too_small(waiting)
        if self.num_regions <= exact_regions:
            rest = self._place_rest(unplaced, best.step_s)
            solved, pruned = solved + rest, pruned - len(rest)
        else:
            floor_s = min([floor_s, *(low_s for low_s, _ in unplaced)])
        best, bound_s = self._prove(best, solved, exact_regions, slack, most_programs)
        bound_s = min(bound_s, floor_s)
        ranked = sorted((one for _, one in solved), key=lambda one: (one.step_s, one.candidate.sizes))
        return ClusterSearch(best, len(waiting), pruned, len(solved), bound_s, tuple(ranked[:20]), slack, left)

    def _place_rest(self, unplaced: Sequence[tuple[float, Candidate]], cutoff_s: float) -> list[tuple[float, Found]]:
        """Return by the integer program what is faster of the candidates for which no placement was found at once."""
        out = []
        for low_s, candidate in unplaced:
            schedule = make_schedule(candidate.schedule, candidate.stages, candidate.micro_batches, candidate.chunks)
            try:
                placed = place_stages(
                    self.regions(candidate), schedule, self.budget, pinned=self.limits.pinned, cutoff_s=cutoff_s
                )
            except InfeasibleError:
                continue
            if placed is not None:
                out.append((max(low_s, placed.bound_s), Found(candidate, placed)))
        return out

    def _fits_once(self, candidate: Candidate) -> bool:
        """Tell whether the state fits, and each region's activations once: they grow with the batch; priced for one."""
        if candidate.micro_batch == 1:
            return True
        one = replace(candidate, micro_batch=1, micro_batches=candidate.micro_batches * candidate.micro_batch)
        if math.isinf(self.bound(one, self.regions(one))):
            return False
        most = max(region.saved_bytes for region in self.priced[one.inner, 1])
        return most * candidate.micro_batch <= self.budget

    def _ordered(self) -> list[tuple[float, float, Candidate]]:
        """Return all candidates with an estimate and a bound, the best estimate first."""
        out = []
        for candidate in candidates(self.hardware, self.batch, self.num_regions, self.limits):
            if not self._fits_once(candidate):
                out.append((math.inf, math.inf, candidate))
                continue
            bound_s = self.bound(candidate, self.regions(candidate))
            idle = (candidate.stages - 1) / candidate.chunks / candidate.micro_batches
            idle *= 0.4 if candidate.schedule in ("zero_bubble", "zbv") else 1.0
            out.append((bound_s * (1.0 + idle), bound_s, candidate))
        return sorted(out, key=lambda row: (row[0], row[1], row[2].sizes, row[2].schedule, row[2].chunks))

    def _prove(
        self, best: Found, solved: Sequence[tuple[float, Found]], exact_regions: int, slack: float, most_programs: int
    ) -> tuple[Found, float]:
        """Raise the bounds of the candidates that might still be faster, and take what turns out to be."""
        waiting = sorted((row for row in solved if row[0] < best.step_s), key=lambda row: row[0])
        if self.num_regions > exact_regions:
            return self._branch(best, waiting, slack, most_programs)
        bound_s = best.step_s
        for low_s, found in waiting:
            if low_s >= best.step_s:
                break
            exact = self._exact(found, best.step_s)
            if exact is not None and exact.step_s < best.step_s:
                best = exact
            bound_s = min(bound_s, max(low_s, exact.placement.bound_s if exact is not None else best.step_s))
        return best, min(bound_s, best.step_s)

    def _branch(
        self, best: Found, waiting: Sequence[tuple[float, Found]], slack: float, left: int
    ) -> tuple[Found, float]:
        """Branch on the cuts of the best candidate, then of those whose bounds are lower than what that proves.

        One that takes many programs comes again behind the others, which its programs would be taken from.
        """
        leaves_s = math.inf
        queue = [(low_s, found, True) for low_s, found in waiting]
        queue.sort(key=lambda row: (row[1].candidate != best.candidate, row[0]))
        while queue:
            low_s, found, first = queue.pop(0)
            if low_s < best.step_s * (1.0 - slack) and left > 0:
                weight = _weight(found)
                is_best = found.candidate == best.candidate
                most = min(left, MOST_PROGRAMS if is_best or not first else FIRST_PROGRAMS)
                branched = branch_stages(
                    self.regions(found.candidate),
                    found.placement,
                    self.budget,
                    pinned=self.limits.pinned,
                    enough_s=best.step_s * (1.0 - slack),
                    slack=slack,
                    max_programs=math.ceil(most / weight),
                )
                left -= math.ceil(branched.programs * weight)
                low_s = max(low_s, branched.bound_s)
                if branched.placement.makespan_s < best.step_s:
                    best = Found(found.candidate, branched.placement)
                if first and not is_best and low_s < best.step_s * (1.0 - slack):
                    queue.append((low_s, Found(found.candidate, branched.placement), False))
                    continue
            leaves_s = min(leaves_s, low_s)
        return best, min(leaves_s, best.step_s)

    def _exact(self, found: Found, cutoff_s: float) -> Found | None:
        placement = place_stages(
            self.regions(found.candidate),
            found.placement.schedule,
            self.budget,
            pinned=self.limits.pinned,
            cutoff_s=cutoff_s,
        )
        return None if placement is None else Found(found.candidate, placement)

    def _too_small(self, waiting: Sequence[tuple[float, float, Candidate]]) -> InfeasibleError:
        """Return the error that names the least memory, and the least number of devices that would do."""
        least = math.inf
        total = 0
        for _, _, candidate in waiting:
            if not self._fits_once(candidate):
                continue
            regions = self.regions(candidate)
            states = [min(v.state_bytes for v in region.variants) for region in regions]
            rest = [min(v.saved_bytes + v.working_bytes for v in region.variants) for region in regions]
            each = max(sum(states) / candidate.stages, max(states)) + max(rest)
            if each < least:
                least, total = each, math.ceil(self.hardware.num_ranks * each / self.budget)
        per_node = self.hardware.devices_per_node
        total = -(-total // per_node) * per_node
        return InfeasibleError(
            f"no split of the model fits into {self.budget / 1e9:.1f} GB a device on {self.hardware}; a device needs "
            f"about {least / 1e9:.1f} GB, so about {total} such devices would do: use at least as many, devices with "
            "more memory, a smaller batch or another optimizer",
            math.ceil(least),
        )


def _weight(found: Found) -> float:
    """Return as how many programs one for a candidate's cuts counts: a long table takes long to simulate."""
    return max(1.0, sum(map(len, found.placement.schedule.actions)) / LONG)


def _work(variant: Variant, number: int) -> float:
    return number * (variant.forward_s + variant.input_s + variant.weight_s)


def _turned(variant: Variant, schedule: str, number: int, stages: int) -> float:
    """Return what a region adds to the first micro-batch's way and, on average, to the work of a rank behind it."""
    first = variant.forward_s
    if schedule == "zero_bubble":
        weights = number * variant.weight_s
    else:
        first += variant.input_s + variant.weight_s
        weights = (number - 1) * variant.weight_s
    forwards = number - 1 if schedule == "gpipe" else max(0, number - stages)
    return first + (forwards * variant.forward_s + (number - 1) * variant.input_s + weights) / stages


def hardware_conditions(hardware: Hardware, optimizer: str) -> Conditions:
    """Return the conditions of a search with nothing else known about the software."""
    one = link(hardware.link_inside)
    return Conditions(device(hardware.device), 1, one, one, 1, optimizer)
