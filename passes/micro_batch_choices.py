"""Choose what the micro-batch axis, an axis in time, does to every op: split the batch, sum over it, or run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import OptionError
from autopar.mesh import Mesh
from autopar.placement import REPLICATE, is_partial

from .program import Program, is_getitem, is_random, result_values, tensor_operands
from .rules.legality import legal
from .rules.rule import Choice, Rule

AXIS = "micro_batch"
"""The name of the axis in time."""

_SLICE, _WHOLE, _COMPLETE, _JOIN, _WAIT, _NEVER = 1, 10, 100, 10_000, 1_000, 10**9


def choose_micro_batches(program: Program, count: int) -> dict[str, Choice]:
    """Return, for every op, what an axis of ``count`` micro-batches does to it.

    The batch is dim 0 of the inputs. What depends on inputs alone (masks, counts of labels) is there whole and
    runs once, unless every reader wants a part of it. What depends on parameters follows its operands: an op whose
    operand is split by the batch splits the same factor, a sum over it is partial, and a partial sum is completed as
    late as the ops let it pass.

    Raises:
        OptionError: the inputs have no common batch, or it does not divide by ``count``.
    """
    return _Chooser(program, count, batch_size(program, count)).run()


def batch_size(program: Program, count: int) -> int:
    """Return the size of the batch: that of dim 0 which most tensor inputs have.

    Raises:
        OptionError: there is no batch, or it does not divide by ``count``.
    """
    nodes = program.nodes()
    shapes = [tuple(nodes[role.node].meta["val"].shape) for role in program.inputs if role.kind == "input"]
    sizes = [shape[0] for shape in shapes if shape]
    if not sizes:
        raise OptionError(
            f"micro_batches={count} cuts the batch, dim 0 of the inputs, but no input is a tensor with dims"
        )
    most = Counter(sizes)
    batch: int = max(sizes, key=lambda size: (most[size], -sizes.index(size)))
    if batch % count:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        raise OptionError(
            f"micro_batches={count} does not divide the batch of {batch} rows; use one of "
            f"{', '.join(map(str, divisors))}"
        )
    return batch


@dataclass
class _State:
    """How a tensor lies over the micro-batches.

    Attributes:
        code: its placement; for a free one the placement that comes by itself.
        free: it is computed from inputs alone, so it is there whole too.
        parameter: it is a parameter or a buffer.
        late: phases (``forward``, ``backward``) of whose totals it needs one.
        phase: the phase that computes it.
    """

    code: int
    free: bool = False
    parameter: bool = False
    late: frozenset[str] = frozenset()
    phase: str = "forward"

    def late_as(self, code: int) -> frozenset[str]:
        """Return the phases of whose totals it needs one when it is read in a placement."""
        completed = not self.free and self.code != REPLICATE and self.code != code
        return self.late | {self.phase} if completed else self.late


class _Chooser:
    def __init__(self, program: Program, count: int, batch: int) -> None:
        self.program, self.count, self.batch = program, count, batch
        self.mesh = Mesh((count,), (AXIS,))
        self.states: dict[fx.Node, list[_State]] = {}
        self.choices: dict[fx.Node, Choice] = {}
        self.wants: dict[fx.Node, list[tuple[int, int]]] = {}

    def run(self) -> dict[str, Choice]:
        for role in self.program.inputs:
            self.enter(self.program.nodes()[role.node], role.kind)
        for node in self.program.graph.nodes:
            if is_getitem(node):
                owner, index = node.args
                self.states[node] = [self.result_state(owner, index)]  # type: ignore[arg-type]
            elif node.op in ("call_function", "get_attr"):
                self.choose(node)
        self.sink()
        return {node.name: choice for node, choice in self.choices.items()}

    def enter(self, node: fx.Node, kind: str) -> None:
        value = node.meta.get("val")
        batched = kind == "input" and isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == self.batch
        self.states[node] = [
            _State(0 if batched else REPLICATE, free=kind == "input", parameter=kind in ("parameter", "buffer"))
        ]

    def result_state(self, owner: fx.Node, index: int) -> _State:
        position = [i for i, _ in result_values(owner)].index(index) if self.is_tensor_result(owner, index) else 0
        return self.states[owner][position]

    def is_tensor_result(self, owner: fx.Node, index: int) -> bool:
        return any(i == index for i, _ in result_values(owner))

    def operand_states(self, node: fx.Node) -> list[_State]:
        return [self.states[operand][0] for operand in tensor_operands(node)]

    def legal_choices(self, node: fx.Node) -> list[Choice]:
        rule: Rule = node.meta["rule"]
        operands = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
        results = [tuple(value.shape) for _, value in result_values(node)]

        def even(codes: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> bool:
            return all(code < 0 or shape[code] % self.count == 0 for code, shape in zip(codes, shapes))

        return [
            choice
            for choice in rule.choices()
            if even(choice.operands, operands)
            and even(choice.results, results)
            and legal(rule, (choice,), operands, results, self.mesh) is None
        ]

    def choose(self, node: fx.Node) -> None:
        rule: Rule = node.meta["rule"]
        states, phase = self.operand_states(node), str(node.meta.get("phase"))
        replicate = rule.choices()[0]
        free = all(state.free for state in states) and phase == "forward" and not _draws(node)
        best = replicate
        if any(state.code != REPLICATE for state in states):
            best = min(self.legal_choices(node), key=lambda choice: self.rank(node, choice, states))
        if free and any(code < 0 for code in best.results):
            best = replicate
        self.choices[node] = replicate if free else best
        late = _late(self.choices[node], states)
        codes = best.results or (REPLICATE,)
        self.states[node] = [_State(code, free, late=late, phase=phase) for code in codes]

    def rank(self, node: fx.Node, choice: Choice, states: Sequence[_State]) -> tuple[int, int]:
        """Return what a choice costs, and how little of the result is split."""
        phase = str(node.meta.get("phase"))
        cost = sum(_cost(state, code) for state, code in zip(states, choice.operands))
        largest = max((value.numel() for _, value in result_values(node)), default=0)
        for operand, state, code in zip(tensor_operands(node), states, choice.operands):
            if is_partial(code) and (state.phase != phase or operand.meta["val"].numel() < largest):
                cost += 2 * _COMPLETE  # a total of the forward is there for the backward; small sums travel better
        loops = any(not state.free and state.code == code != REPLICATE for state, code in zip(states, choice.operands))
        if loops and phase in _late(choice, states):
            cost += _WAIT  # every micro-batch would wait for all others
        if choice.factor is not None and not any(
            state.code == code >= 0 for state, code in zip(states, choice.operands)
        ):
            cost += _NEVER  # it would cut what no operand brings: a weight, say
        return cost, sum(2 if code == REPLICATE else 1 if code < 0 else 0 for code in choice.results)

    def sink(self) -> None:
        """Give ops that run once, but of which every reader wants the same part, to the micro-batches."""
        for result in self.program.outputs:
            if result.node is not None:
                self.wants.setdefault(self.program.nodes()[result.node], []).append((0, REPLICATE))
        for node in reversed(list(self.program.graph.nodes)):
            if is_getitem(node):
                owner, index = node.args
                position = [i for i, _ in result_values(owner)].index(index)  # type: ignore[arg-type]
                self.wants.setdefault(owner, []).extend(  # type: ignore[arg-type]
                    (position, code) for _, code in self.wants.get(node, [])
                )
            elif node in self.choices:
                self.sink_one(node)
                for operand, code in zip(tensor_operands(node), self.choices[node].operands):
                    self.wants.setdefault(operand, []).append((0, code))

    def sink_one(self, node: fx.Node) -> None:
        wants = dict.fromkeys(self.wants.get(node, []))
        states = self.operand_states(node)
        runs_once = self.choices[node].name == "replicate" and all(s.free or s.code == REPLICATE for s in states)
        if not runs_once or not wants or any(code < 0 for _, code in wants) or node.op == "get_attr":
            return
        for choice in self.legal_choices(node):
            gives = all(choice.results[position] == code for position, code in wants)
            cuts_parameter = any(s.parameter and code != REPLICATE for s, code in zip(states, choice.operands))
            if choice.factor is not None and gives and not cuts_parameter:
                self.choices[node] = choice
                return


def _late(choice: Choice, states: Sequence[_State]) -> frozenset[str]:
    return frozenset(phase for state, code in zip(states, choice.operands) for phase in state.late_as(code))


def _draws(node: fx.Node) -> bool:
    return bool(getattr(node.meta.get("rule"), "random", False)) or is_random(node)


def _cost(state: _State, code: int) -> int:
    """Return what it costs that an operand in ``state`` is wanted in ``code``."""
    if is_partial(code):
        return 0 if state.code == code and not state.free else _NEVER
    if state.code == code:
        return 0
    if state.free and code == REPLICATE:
        return _WHOLE
    if state.free or state.code == REPLICATE:
        return _SLICE
    if is_partial(state.code):
        return _COMPLETE + (code != REPLICATE)
    return _JOIN
