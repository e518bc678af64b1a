"""Communication that hides behind compute: a region takes ``max(compute, hideable) + exposed`` seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..find_hideable import find_hideable
from ..program import Program

Parts = tuple[tuple[int, int], ...]
"""``(group, count)`` pairs."""


@dataclass(frozen=True, eq=False)
class Hiding:
    """Which decisions and which transfers make up each region; regions that are alike count as one group.

    Attributes:
        contention: the part of a hidden transfer's time by which it slows what hides it.
        decisions: of every decision, how many of its ops lie in each group.
        networks: of every network, how many of its tensors may hide in each group; none if they may not.
        num_groups: groups there are.
        weights: of the compute of each group against what hides behind it, from 0 to 1: the objective counts
            ``weight compute + (1 - weight) hideable``, which is never above their maximum. Empty for the maximum.
    """

    contention: float
    decisions: tuple[Parts, ...]
    networks: tuple[Parts, ...]
    num_groups: int
    weights: tuple[float, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the maximum itself is the objective."""
        return self.num_groups > 0 and not self.weights

    def compute_weight(self, index: int, multiplicity: int) -> float:
        """Return how often the seconds of a decision count in the weighted objective."""
        parts = self.decisions[index] if self.weights else ()
        return multiplicity - sum(count * (1.0 - self.weights[group]) for group, count in parts)

    def travel_weight(self, number: int, multiplicity: int) -> float:
        """Return how often the seconds of a network's travel count in the weighted objective."""
        parts = self.networks[number] if self.weights else ()
        return multiplicity - self.hidden_share * sum(count * self.weights[group] for group, count in parts)

    @property
    def hidden_share(self) -> float:
        """The part of a transfer's time that can hide."""
        return 1.0 - self.contention


NO_HIDING = Hiding(1.0, (), (), 0)


def find_hiding(
    program: Program, contention: float, tied: Mapping[str, int], members: Sequence[Iterable[str]]
) -> Hiding:
    """Return what can hide where.

    Args:
        program: annotated.
        contention: of the device; 1 where nothing hides.
        tied: decision of every op and placeholder.
        members: the tensors of every network.
    """
    if contention >= 1.0:
        return NO_HIDING
    found = find_hideable(program)
    computed: dict[int, Counter[int]] = defaultdict(Counter)
    moved: dict[int, Counter[int]] = defaultdict(Counter)
    for node in program.ops():
        computed[found.regions[node.name]][tied[node.name]] += 1
    for number, names in enumerate(members):
        names = tuple(names)
        if all(name in found.tensors for name in names):
            for name in names:
                moved[found.regions[name]][number] += 1
    groups: dict[tuple[Parts, Parts], int] = {}
    decisions: dict[int, Counter[int]] = defaultdict(Counter)
    networks: dict[int, Counter[int]] = defaultdict(Counter)
    for region in sorted(moved):
        key = tuple(sorted(computed[region].items())), tuple(sorted(moved[region].items()))
        group = groups.setdefault(key, len(groups))
        for index, count in computed[region].items():
            decisions[index][group] += count
        for number, count in moved[region].items():
            networks[number][group] += count
    return Hiding(
        contention,
        tuple(tuple(sorted(decisions[index].items())) for index in range(max(tied.values(), default=-1) + 1)),
        tuple(tuple(sorted(networks[number].items())) for number in range(len(members))),
        len(groups),
    )
