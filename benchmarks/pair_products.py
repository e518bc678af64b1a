"""Find Megatron's pairs in any program: a product split by columns whose result reaches one that sums over them.

What a column split makes is followed, dim by dim, through the rules of the ops between (pointwise ops, views,
attention, norms over other dims), until an op with a weight sums over it: that is its row. It is lost where it meets an
activation that is not split so (a residual), and where a rule can't split it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.passes.name_roles import FactorRoles
from autopar.passes.program import Program, is_getitem, result_values, tensor_operands
from autopar.passes.rules.rule import PARALLEL, Rule

Labels = tuple[frozenset[str], ...]
NOTHING: frozenset[str] = frozenset()


@dataclass
class Pairs:
    """The ops of all pairs.

    Attributes:
        factors: op -> the factor that the model axis splits: columns, rows, and rows of embedding tables.
        rows: those of them that sum over what columns made.
        inside: ops between, which follow.
        active: ops that depend on parameters and inputs; all others are weights, masks, positions.
    """

    factors: dict[str, str] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)


def pair_products(program: Program, roles: FactorRoles, parts: int) -> Pairs:
    """Return the pairs of an annotated program that ``parts`` ranks can split evenly.

    A column that no row follows is kept when it is the last product (a head), otherwise left alone (a router).

    Args:
        program: annotated.
        roles: what its factors are called.
        parts: ranks of the model axis.
    """
    return _Walk(program, roles, parts).run()


class _Walk:
    def __init__(self, program: Program, roles: FactorRoles, parts: int) -> None:
        self.program, self.roles, self.parts = program, roles, parts
        self.labels: dict[str, Labels] = {}
        self.weights = {role.node for role in program.inputs if role.kind == "parameter"}
        self.inputs = {role.node for role in program.inputs if role.kind == "input"}
        self.touched: dict[str, frozenset[str]] = {}
        self.columns: dict[str, str] = {}
        self.closed: dict[str, frozenset[str]] = {}
        self.out = Pairs()
        self.last = ""

    def run(self) -> Pairs:
        """Walk the forward once, then keep the columns that are closed or last."""
        for node in self.program.graph.nodes:
            if "rule" in node.meta and node.meta["phase"] == "forward":
                self._visit(node)
        kept = frozenset().union(*self.closed.values()) | ({self.last} & set(self.columns))
        out = self.out
        out.factors |= {name: factor for name, factor in self.columns.items() if name in kept}
        out.inside = {name for name, labels in self.touched.items() if labels & kept} - set(out.factors)
        return out

    def _visit(self, node: fx.Node) -> None:
        rule: Rule = node.meta["rule"]
        operands = tensor_operands(node)
        if operands and all(operand.name in self.weights for operand in operands):
            self._name_results(node, self.weights)
            return
        if any(operand.name in self.weights or operand.name in self.out.active for operand in operands):
            self._name_results(node, self.out.active)
        if any(operand.name in self.inputs for operand in operands) and node.name not in self.out.active:
            self._name_results(node, self.inputs)
        found = self._factor_labels(rule, operands)
        self.touched[node.name] = frozenset().union(*found.values())
        heavy = [i for i, x in enumerate(operands) if x.name in self.weights and x.meta["val"].dim() >= 2]
        light = [i for i, x in enumerate(operands) if x.name not in self.weights]
        if heavy and light:
            self._visit_product(node, rule, heavy[0], light, found)
        self._set_labels(node, [tuple(found.get(name or "", NOTHING) for name in dims) for dims in rule.results])

    def _name_results(self, node: fx.Node, names: set[str]) -> None:
        names.add(node.name)
        names.update(user.name for user in node.users if is_getitem(user))

    def _factor_labels(self, rule: Rule, operands: list[fx.Node]) -> dict[str, frozenset[str]]:
        """Return which columns each factor runs over: those that every activation that indexes it carries."""
        found: dict[str, frozenset[str]] = {}
        lost: set[str] = set()
        for dims, operand in zip(rule.operands, operands, strict=True):
            labels = self.labels.get(operand.name, (NOTHING,) * len(dims))
            for name, label in zip(dims, labels, strict=True):
                if name is not None and label:
                    found[name] = found.get(name, NOTHING) | label
                elif name is not None and operand.name in self.out.active:
                    lost.add(name)
        return {name: label for name, label in found.items() if name not in lost}

    def _visit_product(
        self, node: fx.Node, rule: Rule, heavy: int, light: list[int], found: dict[str, frozenset[str]]
    ) -> None:
        mine = {name for name in rule.operands[heavy] if name is not None}
        theirs = {name for i in light for name in rule.operands[i] if name is not None}
        even = {factor.name for factor in rule.factors if factor.size % self.parts == 0 and factor.size > 1}
        vocab = [name for name, role in self.roles.get(node.name, {}).items() if role == "vocab" and name in mine]
        if vocab:
            if set(vocab) <= even and all(tensor_operands(node)[i].name in self.inputs for i in light):
                self.out.factors[node.name] = vocab[0]
            return
        kinds = {factor.name: factor.kind for factor in rule.factors}
        rows = sorted(name for name in mine & theirs & even if kinds[name] == "sum" and found.get(name))
        if rows:
            self.out.factors[node.name] = rows[0]
            self.out.rows.add(node.name)
            self.closed[node.name] = found.pop(rows[0])
            return
        shown = {name for dims in rule.results for name in dims if name is not None}
        columns = sorted(name for name in (mine & shown & even) - theirs if kinds[name] == PARALLEL)
        self.last = node.name
        if columns:
            self.columns[node.name] = columns[0]
            found[columns[0]] = frozenset({node.name})

    def _set_labels(self, node: fx.Node, results: list[Labels]) -> None:
        if isinstance(node.meta["val"], torch.Tensor):
            self.labels[node.name] = results[0]
            return
        slots = {index: slot for slot, (index, _) in enumerate(result_values(node))}
        for user in node.users:
            if is_getitem(user) and user.args[1] in slots:
                self.labels[user.name] = results[slots[user.args[1]]]  # type: ignore[index]
