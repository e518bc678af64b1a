"""The form of a sharding rule: an op's factors, as the letters of an einsum, and what a split does to it.

``mm`` is ``m k, k n -> m n``: three factors, each a loop dimension; ``k`` is a reduction. Split a factor over an axis
and every operand that indexes it is sharded on that dim, every operand that does not is replicated, every result that
indexes it is sharded, and every result that does not is partial (a reduction) or equal everywhere (``parallel``
factors that a result does not index would be a contradiction, unless ``same`` names the result).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.placement import PARTIAL, REPLICATE

Dims = tuple[str | None, ...]
"""One entry a tensor dim: the factor that a shard of this dim splits, or None where a shard is impossible."""

PARALLEL = "parallel"
BLOCKED = "blocked"


@dataclass(frozen=True)
class Factor:
    """One loop dimension of an op.

    Attributes:
        name: unique in the rule; conventional letters (b, s, h, ...) or the dim's role (``vocab``).
        size: its global length.
        kind: ``"parallel"``; a reduction (``"sum"``, ``"max"``, ``"min"``, ``"product"``); or ``"blocked"``
            (never split).
        even: pieces must all be equal (the factor has inner factors in some dim: a view that merges or splits dims).
        role: what a person calls a split of it, for the plan's text: ``batch``, ``sequence``, ``column``, ``row``,
            ``head``, ``vocab``, ``expert``, ``channel``; empty if nothing better than the name is known.
        growth: how much more work the end of the factor has than its start, in units of the mean: 0 to 2 (the queries
            of a causal attention over as many keys).
    """

    name: str
    size: int
    kind: str = PARALLEL
    even: bool = False
    role: str = ""
    growth: float = 0.0

    def work_share(self, length: Any) -> Any:
        """Return the share of the op's work in the piece of ``length`` (a number or an array) that has the most.

        With work ``1 + growth * (t - 1/2)`` at ``t`` in [0, 1] along the factor, the last piece has the most.

        >>> Factor("l", 8, growth=2.0).work_share(2.0), Factor("l", 8).work_share(2.0)
        (0.4375, 0.25)
        """
        part = length / max(1, self.size)
        return part * (1.0 + self.growth / 2.0 * (1.0 - part))


@dataclass(frozen=True)
class Choice:
    """What one axis does to an op: a factor, ``replicate``, or a partial that passes through.

    Attributes:
        name: the factor's name, ``"replicate"``, or ``"partial(sum):<operands>"`` and so on; unique in the rule.
        operands: the placement code of every tensor operand on that axis.
        results: the placement code of every tensor result.
        factor: the factor that is split, or None.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    factor: Factor | None = None


@dataclass(frozen=True)
class Piece:
    """The part of a factor that a rank works on: ``offset``, ``length`` of ``size``, cut over ``parts`` ranks."""

    offset: int
    length: int
    size: int
    parts: int


@dataclass
class LocalCall:
    """One op about to be emitted for one rank, as a rule's ``localize`` sees it.

    ``emit`` runs or records an op: in the lowered graph it adds a node, in the checker it computes at once, so a
    rewrite is written once. Operands in ``args`` and ``kwargs`` are handles of whatever ``emit`` takes and returns.

    Attributes:
        target: the op.
        args, kwargs: its arguments, tensor operands replaced by local ones.
        pieces: the part of every factor of the rule (whole factors too, with ``parts`` 1), by name.
        operand_shapes: local shape of every tensor operand, in ``tensor_operands`` order.
        result_shapes: local shape of every tensor result.
        result_dtypes: dtype of every tensor result.
        emit: ``emit(target, *args, **kwargs) -> handle``.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pieces: dict[str, Piece]
    operand_shapes: list[tuple[int, ...]]
    result_shapes: list[tuple[int, ...]]
    result_dtypes: list[Any]
    emit: Callable[..., Any]

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Emit the op itself, with other arguments where given."""
        return self.emit(self.target, *(args or self.args), **{**self.kwargs, **kwargs})


Localize = Callable[[LocalCall], Any]


@dataclass(frozen=True)
class Rule:
    """How an op may be split.

    Attributes:
        factors: its loop dimensions.
        operands: the ``Dims`` of every tensor operand, in ``tensor_operands`` order.
        results: the ``Dims`` of every tensor result, in ``result_values`` order.
        linear: groups of operands through which a partial sum passes together: ``((0,), (1,))`` for a product (either
            alone), ``((0, 1),)`` for a sum (both at once). All results are then partial.
        through: the same for other partial ops: ``(("max", (0,)),)`` for a monotone op.
        same: results that are complete and equal on every rank when the named factor is split, though they do not
            index it: ``(("ci", 2),)``.
        localize: emits the op for one rank; None emits it as it is, on local operands (right when no argument but the
            operands carries a shape or an offset).
        flops: floating point operations of the whole op; 0 for an op bound by memory traffic.
        random: the op draws random numbers.
        reason: why the op is not split further (shown in the plan); empty for a full rule.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    through: tuple[tuple[str, tuple[int, ...]], ...] = ()
    same: tuple[tuple[str, int], ...] = ()
    localize: Localize | None = field(default=None, compare=False)
    flops: float = 0.0
    random: bool = False
    reason: str = ""

    def factor(self, name: str) -> Factor:
        """Return the factor called ``name``."""
        return next(factor for factor in self.factors if factor.name == name)

    def choices(self) -> tuple[Choice, ...]:
        """Return everything that one axis may do to this op; ``replicate`` comes first."""
        none_in, none_out = (REPLICATE,) * len(self.operands), (REPLICATE,) * len(self.results)
        out = [Choice("replicate", none_in, none_out)]
        for factor in self.factors:
            if factor.kind != BLOCKED and factor.size > 1:
                out.append(self._split(factor))
        groups = [("sum", group) for group in self.linear] + list(self.through)
        for op, group in groups:
            operands = tuple(PARTIAL[op] if i in group else REPLICATE for i in range(len(self.operands)))
            label = f"partial({op}):{','.join(map(str, group))}"
            out.append(Choice(label, operands, (PARTIAL[op],) * len(self.results)))
        return tuple(out)

    def _split(self, factor: Factor) -> Choice:
        operands = tuple(_code(dims, factor.name, REPLICATE) for dims in self.operands)
        results = []
        for index, dims in enumerate(self.results):
            if factor.kind == PARALLEL or (factor.name, index) in self.same:
                missing = REPLICATE
            else:
                missing = PARTIAL[factor.kind]
            results.append(_code(dims, factor.name, missing))
        return Choice(factor.name, operands, tuple(results), factor)


def _code(dims: Dims, name: str, missing: int) -> int:
    return dims.index(name) if name in dims else missing


def validate(rule: Rule, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]) -> list[str]:
    """Return what is wrong with the form of a rule for an op of these shapes; an empty list when nothing is."""
    faults = []
    names = [factor.name for factor in rule.factors]
    if len(set(names)) != len(names):
        faults.append(f"factor names repeat: {names}")
    sides = (("operand", rule.operands, operand_shapes), ("result", rule.results, result_shapes))
    for what, all_dims, shapes in sides:
        if len(all_dims) != len(shapes):
            faults.append(f"the rule has {len(all_dims)} {what}s, the op {len(shapes)}")
            continue
        for i, (dims, shape) in enumerate(zip(all_dims, shapes)):
            if len(dims) != len(shape):
                faults.append(f"{what} {i} has {len(shape)} dims, the rule {len(dims)}")
            used = [name for name in dims if name is not None]
            if len(set(used)) != len(used):
                faults.append(f"{what} {i} indexes a factor twice: {dims}")
            faults += [f"{what} {i} indexes an unknown factor {name}" for name in used if name not in names]
    for factor in rule.factors:
        if factor.kind == PARALLEL and factor.size > 1:
            lost = [
                i
                for i, dims in enumerate(rule.results)
                if factor.name not in dims and (factor.name, i) not in rule.same
            ]
            if lost:
                faults.append(f"results {lost} do not index the parallel factor {factor.name}")
    return faults
