"""Find the rule of an op that has none: try splits on small random inputs and keep what the checker can't refute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.passes.program import tensor_operands
from autopar.passes.rules.check import check_rule, eager
from autopar.passes.rules.form import linear_groups, make_rule, operand_shapes, result_shapes
from autopar.passes.rules.isolated import Crashed, isolated
from autopar.passes.rules.rule import PARALLEL, Factor, Rule
from autopar.passes.rules.table import replicated_rule

SMALL = (8, 20, 28, 44, 52, 68)
"""Sizes that stand for the distinct sizes of an op's dims: 2 and 4 cut them evenly, 3 does not, and no multiples."""

MAX_CANDIDATES = 512
MAX_ELEMENTS = 1 << 18

Dims = list[str | None]


@dataclass(frozen=True)
class _Found:
    """A factor that held: where operands and results index it."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    kind: str
    even: bool


@dataclass(frozen=True)
class _Findings:
    factors: tuple[_Found, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    random: bool = False
    reason: str = ""


_CACHE: dict[Any, _Findings] = {}


def discover(node: fx.Node) -> Rule:
    """Return a rule of an op that is not in the table; never raises.

    Dims of equal size are tried together, as parallel factors and as sums, then partial operands. What holds on small
    random inputs, cut evenly and unevenly, is kept. An op that is random, that writes to its operands, that computes
    shapes from data or that can't be run here is replicated, and the rule's reason says so.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return replicated_rule(node, f"{node.target} is no library op")
    key = _pattern(node)
    if key not in _CACHE:
        _CACHE[key] = _find(node)
    return _rule_from(node, _CACHE[key])


def _pattern(node: fx.Node) -> Any:
    """Return what a finding depends on: the op, its shapes and dtypes, its other arguments."""
    shapes = tuple((tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in tensor_operands(node))
    rest = pytree.tree_map(lambda leaf: "tensor" if isinstance(leaf, fx.Node) else leaf, (node.args, node.kwargs))
    return (str(node.target), shapes, repr(rest), tuple(result_shapes(node)))


def _rule_from(node: fx.Node, findings: _Findings) -> Rule:
    if findings.random or findings.reason:
        whole = replicated_rule(node, findings.reason)
        return replace(whole, random=findings.random)
    operands: list[Dims] = [[None] * len(shape) for shape in operand_shapes(node)]
    results: list[Dims] = [[None] * len(shape) for shape in result_shapes(node)]
    for i, found in enumerate(findings.factors):
        for sides, places in ((operands, found.operands), (results, found.results)):
            for dims, place in zip(sides, places):
                if place is not None:
                    dims[place] = f"f{i}"
    nothing = not findings.factors and not findings.linear
    return make_rule(
        node,
        operands,
        results,
        kinds={f"f{i}": found.kind for i, found in enumerate(findings.factors)},
        even=[f"f{i}" for i, found in enumerate(findings.factors) if found.even],
        linear=linear_groups(node, *findings.linear),
        reason=f"no rule for {node.target}, and no split of it was found" if nothing else "",
    )


def _find(node: fx.Node) -> _Findings:
    target: Any = node.target
    if target._schema.is_mutable:
        return _Findings(reason=f"{target} writes to its arguments")
    if torch.Tag.nondeterministic_seeded in target.tags:
        return _Findings(random=True, reason=f"{target} draws random numbers")
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(target.tags):
        return _Findings(reason=f"the results of {target} have shapes that depend on data")
    try:
        return isolated(lambda: _tried(node))  # kernels may trust their arguments: invented ones can crash them
    except (Crashed, OSError) as error:
        return _Findings(reason=f"no rule for {target}, and it can't be tried here: {error}")


def _tried(node: fx.Node) -> _Findings:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            return _try(node)
        except _DrawsRandomly:
            return _Findings(random=True, reason=f"{node.target} differs from run to run on the same inputs")
        except Exception as error:  # a custom op may raise anything, and a plan must come out all the same
            return _Findings(
                reason=f"no rule for {node.target}, and it can't be tried here: {type(error).__name__}: {error}"
            )


class _DrawsRandomly(Exception):
    """Two runs of an op on the same inputs differ."""


def _try(node: fx.Node) -> _Findings:
    fault = "its inputs are too large to try as they are"
    for sizes in (_small_sizes(node), _true_sizes(node)):
        if sizes is None:
            continue
        trials = []
        for integers in _integers(node, sizes):
            trial = _Trial(node.target, *_inputs(node, sizes, integers))
            unfit = trial.unfit(node)
            if unfit is None:
                trials.append(trial)
            else:
                fault = unfit
        if trials:
            return _findings(trials)
    raise ValueError(fault)


def _small_sizes(node: fx.Node) -> dict[int, int] | None:
    """Return a small size for every distinct size above 1; None when there are too many."""
    sizes = sorted({n for shape in operand_shapes(node) for n in shape if n > 1})
    return dict(zip(sizes, SMALL)) if len(sizes) <= len(SMALL) else None


def _true_sizes(node: fx.Node) -> dict[int, int] | None:
    """Return that sizes stay as they are; None when the operands are large."""
    large = sum(o.meta["val"].numel() for o in tensor_operands(node)) > MAX_ELEMENTS
    return None if large else {}


class _Integers(NamedTuple):
    """How integers are made: below ``top``; rising along the dim ``along`` of each operand, or at random.

    With ``ends`` they rise to ``top`` itself, as offsets behind pieces do.
    """

    top: int
    along: int | None = None
    ends: bool = False


def _integers(node: fx.Node, sizes: dict[int, int]) -> list[_Integers]:
    """Return the ways in which integers are tried: 0 or 1, at random, rising along each dim, and as offsets.

    Indices that rise along a dim send its pieces to places of their own; random ones mix them.
    """
    vals = [operand.meta["val"] for operand in tensor_operands(node)]
    dims = [v.dim() for v in vals if not (v.dtype.is_floating_point or v.dtype.is_complex or v.dtype is torch.bool)]
    if not dims:
        return [_Integers(2)]
    tops = sorted({sizes.get(n, n) for shape in operand_shapes(node) for n in shape if n > 2})
    found = [_Integers(2)]
    for top in tops:
        found += [_Integers(top, -1, ends=True), _Integers(top)]
        found += [_Integers(top, -1 - dim) for dim in range(max(dims))]
    return found


def _inputs(node: fx.Node, sizes: dict[int, int], integers: _Integers) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return random inputs; integers are made as ``integers`` says."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        val = leaf.meta["val"]
        if not isinstance(val, Tensor):
            return val
        shape = [sizes.get(n, n) for n in val.shape]
        if val.dtype.is_floating_point or val.dtype.is_complex:
            return torch.randn(shape, dtype=val.dtype)
        if integers.along is None or val.dtype is torch.bool or not shape:
            return torch.randint(0, 2 if val.dtype is torch.bool else integers.top, shape).to(val.dtype)
        dim = max(integers.along, -len(shape))
        first = 1 if integers.ends else 0
        steps = torch.arange(first, shape[dim] + first) * integers.top // shape[dim]
        return steps.view(-1, *[1] * (-dim - 1)).expand(shape).to(val.dtype).contiguous()

    return pytree.tree_map(make, (tuple(node.args), dict(node.kwargs)))  # type: ignore[no-any-return]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold the same, NaNs included."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())


class _Trial:
    """One op on one set of real inputs."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs
        self.tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        self.whole: list[Tensor] = []

    def unfit(self, node: fx.Node) -> str | None:
        """Return why nothing can be learned from these inputs; None when something can."""
        before = [tensor.clone() for tensor in self.tensors]
        try:
            first, again = self.run(), self.run()
        except Exception as error:  # the op says that it does not take such inputs
            return f"{type(error).__name__}: {error}"
        if any(not _equal(a, b) for a, b in zip(before, self.tensors)):
            return "it writes to its arguments"
        if any(not _equal(a, b) for a, b in zip(first, again)):
            raise _DrawsRandomly
        if [t.dim() for t in first] != [len(shape) for shape in result_shapes(node)]:
            return "its results have other dims on other sizes"
        self.whole = first
        return None

    def run(self) -> list[Tensor]:
        """Run the op once."""
        return [t for t in pytree.tree_leaves(eager(self.target, *self.args, **self.kwargs)) if isinstance(t, Tensor)]

    def informative(self) -> bool:
        """Tell whether every result has numbers in it: sums of zeros prove nothing."""
        return all(result.dtype is not torch.bool and bool(result.ne(0).any()) for result in self.whole)

    def holds(self, rule: Rule, parts: int | tuple[int, int]) -> bool:
        """Tell whether the checker finds nothing wrong."""
        only = [choice.name for choice in rule.choices()[1:]]
        return not check_rule(self.target, self.args, self.kwargs, rule, parts=parts, only=only)


def _findings(trials: list[_Trial]) -> _Findings:
    """Return the factors and the partial operands that hold in every trial."""
    search = _Search(trials)
    factors = tuple(search.factors())
    floats = [i for i, tensor in enumerate(search.operands) if tensor.is_floating_point()]
    groups = [(i,) for i in floats] + ([tuple(floats)] if len(floats) > 1 else [])
    nothing = [tuple((None,) * t.dim() for t in side) for side in (search.operands, search.results)]
    linear = [
        group
        for group in groups
        if search.informative and search.holds(Rule((), nothing[0], nothing[1], linear=(group,)), 2)
    ]
    found = _Findings(factors, tuple(linear))
    if search.holds(_whole_rule(found, search.operands, search.results), (2, 2)):
        return found
    return _Findings(factors[:1])  # what holds alone does not hold in pairs


def _whole_rule(found: _Findings, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Rule:
    """Return the rule of all findings on the trial's own sizes."""
    sides = []
    read, written = [f.operands for f in found.factors], [f.results for f in found.factors]
    for tensors, places in ((operands, read), (results, written)):
        dims: list[Dims] = [[None] * tensor.dim() for tensor in tensors]
        for i, where in enumerate(places):
            for own, place in zip(dims, where):
                if place is not None:
                    own[place] = f"f{i}"
        sides.append(tuple(map(tuple, dims)))
    factors = []
    for i, factor in enumerate(found.factors):
        size = next(t.shape[p] for t, p in zip(operands, factor.operands) if p is not None)
        factors.append(Factor(f"f{i}", size, factor.kind, factor.even))
    return Rule(tuple(factors), sides[0], sides[1], linear=found.linear)


class _Search:
    """The search for factors that hold in every one of some trials of equal shapes."""

    def __init__(self, trials: list[_Trial]) -> None:
        self.trials = trials
        self.operands, self.results = trials[0].tensors, trials[0].whole
        self.informative = any(trial.informative() for trial in trials)

    def holds(self, rule: Rule, parts: int | tuple[int, int]) -> bool:
        """Tell whether no trial refutes a rule."""
        return all(trial.holds(rule, parts) for trial in self.trials)

    def factors(self) -> Iterator[_Found]:
        """Yield disjoint factors that hold; those that index most dims are tried first."""
        taken: set[tuple[str, int, int]] = set()
        sizes = sorted({n for tensor in self.operands for n in tensor.shape if n > 1})
        for size in sizes:
            for operands, results in _candidates(self.operands, self.results, size):
                places = {
                    *(("in", i, d) for i, d in enumerate(operands) if d is not None),
                    *(("out", i, d) for i, d in enumerate(results) if d is not None),
                }
                if places & taken:
                    continue
                found = self.test(operands, results, size)
                if found is not None:
                    taken |= places
                    yield found

    def test(self, operands: tuple[int | None, ...], results: tuple[int | None, ...], size: int) -> _Found | None:
        """Return the factor of one candidate if it holds as parallel or as a reduction."""
        if all(place is not None for place in results):
            kinds = [PARALLEL]
        elif any(place is not None for place in results):
            kinds = ["sum"]
        else:
            kinds = ["sum", "max", "min"]
        if kinds != [PARALLEL] and not self.informative:
            return None
        for kind in kinds:
            rule = self.rule(operands, results, size, kind, even=False)
            if self.holds(rule, 2):
                uneven = self.holds(rule, 3)
                if uneven or self.holds(replace(rule, factors=(replace(rule.factors[0], even=True),)), 4):
                    return _Found(operands, results, kind, even=not uneven)
        return None

    def rule(
        self, operands: tuple[int | None, ...], results: tuple[int | None, ...], size: int, kind: str, *, even: bool
    ) -> Rule:
        """Return the rule of one factor ``f``."""

        def dims(tensors: Sequence[Tensor], places: tuple[int | None, ...]) -> tuple[tuple[str | None, ...], ...]:
            return tuple(
                tuple("f" if d == place else None for d in range(t.dim())) for t, place in zip(tensors, places)
            )

        return Rule((Factor("f", size, kind, even),), dims(self.operands, operands), dims(self.results, results))


Candidate = tuple[tuple[int | None, ...], tuple[int | None, ...]]


def _candidates(operands: Sequence[Tensor], results: Sequence[Tensor], size: int) -> list[Candidate]:
    """Return the ways to index a factor of ``size``: at least one operand does, each tensor at most once."""

    def places(tensors: Sequence[Tensor]) -> list[list[int | None]]:
        return [[*(d for d, n in enumerate(t.shape) if n == size), None] for t in tensors]

    inside, outside = places(operands), places(results)
    count = 1
    for options in (*inside, *outside):
        count *= len(options)
    if count > MAX_CANDIDATES:
        return []
    found = [
        (ins, outs) for ins in product(*inside) if any(place is not None for place in ins) for outs in product(*outside)
    ]
    return sorted(found, key=lambda pair: sum(place is None for place in (*pair[0], *pair[1])))
