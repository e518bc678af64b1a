"""Check a rule: split the operands, run the op on each piece, combine, compare with the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.mesh import Mesh
from autopar.passes.rules.factories import UNSPECIFIED
from autopar.passes.rules.legality import legal, operand_layouts, result_layouts
from autopar.passes.rules.rule import Choice, LocalCall, Piece, Rule, validate
from autopar.placement import PARTIAL_NAMES, PARTIAL_SUM, REPLICATE, local_range, local_shape

Coordinate = tuple[int, ...]
Grid = dict[Coordinate, Tensor]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest accepted error of a result, as a share of the largest number in play."""


def node_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Return a graph node of ``target`` on placeholders for the tensors of its arguments, with fake values."""
    graph, mode = fx.Graph(), _fake_mode()

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(leaf.detach())
        return node

    args, kwargs = pytree.tree_map(place, (tuple(args), dict(kwargs or {})))
    node = graph.call_function(target, tuple(args), kwargs)
    fake_args, fake_kwargs = pytree.tree_map(_value, (node.args, node.kwargs))
    with mode, torch.no_grad():
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


@cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


def _value(leaf: Any) -> Any:
    return leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf


def eager(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op at once: the ``emit`` of a check."""
    with torch.no_grad():
        return target(*args, **kwargs)


def split_tensor(whole: Tensor, layout: Sequence[int], sizes: Sequence[int]) -> Grid:
    """Return every rank's piece of a tensor; partial values are random terms that combine to it."""
    grid: Grid = {(): whole}
    for code, parts in zip(layout, sizes):
        grid = {
            (*coordinate, index): piece
            for coordinate, tensor in grid.items()
            for index, piece in enumerate(_split_once(tensor, code, parts))
        }
    return grid


def _split_once(tensor: Tensor, code: int, parts: int) -> Sequence[Tensor]:
    if code >= 0:
        # Copies: an op that looks past its operand into the memory behind it must not find the other pieces there.
        return [piece.clone(memory_format=torch.contiguous_format) for piece in torch.chunk(tensor, parts, dim=code)]
    if code == REPLICATE:
        return [tensor] * parts
    return _terms(tensor, PARTIAL_NAMES[code], parts)


def _terms(tensor: Tensor, op: str, parts: int) -> list[Tensor]:
    """Return random tensors which ``op`` combines to ``tensor``."""
    noise = [_noise(tensor) for _ in range(parts - 1)]
    if op == "sum":
        return [*noise, tensor - sum(noise, torch.zeros_like(tensor))]
    if op == "product":
        return [torch.ones_like(tensor) for _ in noise] + [tensor]
    owner = torch.randint(0, parts, tensor.shape)
    sign = -1 if op == "max" else 1
    return [torch.where(owner == i, tensor, tensor + sign * _noise(tensor).abs()) for i in range(parts)]


def _noise(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn_like(tensor)
    return torch.randint_like(tensor, -3, 4) if tensor.dtype is not torch.uint8 else torch.zeros_like(tensor)


def combine(grid: Grid, layout: Sequence[int], tolerance: float) -> tuple[Tensor, str]:
    """Return the whole of every rank's piece, and a fault when ranks that should hold the same do not."""
    fault = ""
    for code in reversed(layout):
        groups: dict[Coordinate, list[Tensor]] = {}
        for coordinate in sorted(grid):
            groups.setdefault(coordinate[:-1], []).append(grid[coordinate])
        grid = {}
        for coordinate, pieces in groups.items():
            if code == REPLICATE and any(_distance(piece, pieces[0])[0] > tolerance for piece in pieces):
                fault = f"ranks along an axis that should hold the same differ at {coordinate}"
            grid[coordinate] = _combine_once(pieces, code)
    return grid[()], fault


def _combine_once(pieces: list[Tensor], code: int) -> Tensor:
    if code >= 0:
        return torch.cat(pieces, dim=code)
    if code == REPLICATE:
        return pieces[0]
    stacked = torch.stack(pieces)
    if code == PARTIAL_SUM:
        return stacked.sum(0, dtype=stacked.dtype if stacked.dtype is not torch.bool else torch.int64)
    name = PARTIAL_NAMES[code]
    return stacked.prod(0, dtype=stacked.dtype) if name == "product" else getattr(stacked, f"a{name}")(0)


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest number of ``b``; infinite when shapes, dtypes or NaNs differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf"), 1.0
    if not a.numel():
        return 0.0, 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    unequal = ~((x == y) | (x.isnan() & y.isnan()))
    gap = torch.where(unequal, (x - y).abs(), torch.zeros(())).nan_to_num(float("inf"), float("inf"))
    size = y.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(gap.max()), float(size.max())


def check_rule(
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rule: Rule,
    *,
    parts: int | tuple[int, int],
    only: Sequence[str] | None = None,
    most: int = 1000,
) -> list[str]:
    """Return what is wrong with a rule for an op on real tensors; an empty list when it holds.

    Args:
        parts: the ranks of an axis; two numbers check every pair of choices on two axes at once.
        only: names of choices to check; all by default.
        most: about how many pairs of choices to check; every so many of them, when there are more.
    """
    sizes = (parts,) if isinstance(parts, int) else tuple(parts)
    tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
    seed = 1234
    torch.default_generator.manual_seed(seed)
    whole = _results(eager(target, *args, **kwargs))
    shapes = [tuple(t.shape) for t in tensors], [tuple(t.shape) for t in whole]
    faults = validate(rule, *shapes)
    if faults:
        return faults
    choices = [choice for choice in rule.choices() if only is None or choice.name in only]
    mesh = Mesh(sizes)
    combinations = [c for c in product(choices, repeat=len(sizes)) if legal(rule, c, *shapes, mesh) is None]
    for combination in combinations[:: max(1, len(combinations) // most)]:
        trial = _Trial(target, tuple(args), kwargs, rule, combination, sizes, tensors, whole, seed)
        faults += [f"{'/'.join(c.name for c in combination)} over {sizes}: {fault}" for fault in trial.faults()]
    return faults


def _results(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Trial:
    """One op under one choice an axis."""

    def __init__(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rule: Rule,
        choices: tuple[Choice, ...],
        sizes: Coordinate,
        tensors: list[Tensor],
        whole: list[Tensor],
        seed: int,
    ) -> None:
        self.target, self.args, self.kwargs, self.rule = target, args, kwargs, rule
        self.choices, self.sizes, self.tensors, self.whole, self.seed = choices, sizes, tensors, whole, seed

    def faults(self) -> list[str]:
        """Return how the combined pieces differ from the whole."""
        layouts = operand_layouts(self.choices) or [()] * len(self.tensors)
        grids = [split_tensor(tensor, layout, self.sizes) for tensor, layout in zip(self.tensors, layouts)]
        pieces: list[Grid] = [{} for _ in self.whole]
        for coordinate in product(*(range(n) for n in self.sizes)):
            try:
                results = self.run([grid[coordinate] for grid in grids], coordinate)
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
                return [f"{type(error).__name__} on rank {coordinate}: {error}"]
            for index, result in enumerate(results):
                expected = self.result_shapes(coordinate)[index]
                if tuple(result.shape) != expected:
                    return [f"result {index} on rank {coordinate} has shape {tuple(result.shape)}, not {expected}"]
                pieces[index][coordinate] = result
        if self.target in UNSPECIFIED:
            return []
        return [fault for index, grid in enumerate(pieces) for fault in self.compare(index, grid, grids)]

    def result_shapes(self, coordinate: Coordinate) -> list[Coordinate]:
        """Return the local shape of every result."""
        layouts = result_layouts(self.choices)
        return [local_shape(t.shape, layout, self.sizes, coordinate) for t, layout in zip(self.whole, layouts)]

    def run(self, operands: list[Tensor], coordinate: Coordinate) -> list[Tensor]:
        """Run the op of one rank."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        rest = iter(operands)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        torch.default_generator.manual_seed(self.seed)
        if self.rule.localize is None:
            return _results(eager(self.target, *args, **kwargs))
        call = LocalCall(
            target=self.target,
            args=tuple(args),
            kwargs=dict(kwargs),
            pieces={factor.name: self.piece(factor.name, factor.size, coordinate) for factor in self.rule.factors},
            operand_shapes=[tuple(t.shape) for t in operands],
            result_shapes=list(self.result_shapes(coordinate)),
            result_dtypes=[t.dtype for t in self.whole],
            emit=eager,
        )
        return _results(self.rule.localize(call))

    def piece(self, name: str, size: int, coordinate: Coordinate) -> Piece:
        """Return a rank's part of a factor."""
        cuts = [
            (self.sizes[axis], coordinate[axis])
            for axis, choice in enumerate(self.choices)
            if choice.factor is not None and choice.factor.name == name
        ]
        offset, length = local_range(size, cuts)
        parts = 1
        for count, _ in cuts:
            parts *= count
        return Piece(offset, length, size, parts)

    def compare(self, index: int, grid: Grid, operands: list[Grid]) -> list[str]:
        """Return how result ``index`` differs from the whole."""
        want = self.whole[index]
        terms = [piece for grid_of in (grid, *operands) for piece in grid_of.values() if piece.is_floating_point()]
        bound = max([1.0, *(_distance(piece, piece)[1] for piece in terms)])
        dtypes = {want.dtype, *(piece.dtype for piece in terms)} if want.dtype in TOLERANCE else {want.dtype}
        tolerance = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes) * bound
        found, fault = combine(grid, result_layouts(self.choices)[index], tolerance)
        faults = [f"result {index}: {fault}"] if fault else []
        gap, _ = _distance(found, want)
        if gap > tolerance:
            faults.append(f"result {index} is off by {gap:.3g} (tolerance {tolerance:.3g})")
        return faults
