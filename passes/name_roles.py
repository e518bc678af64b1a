"""Name what a split of a factor is called: batch, sequence, column, row, head, vocab, ..."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .program import Program, is_getitem, result_values, tensor_operands
from .rules.micro_batches import JOIN, MICRO_BATCH
from .rules.rule import Rule

Labels = tuple[str, ...]
FactorRoles = Mapping[str, Mapping[str, str]]
"""Op node -> factor name -> role; factors that nobody has a word for are left out."""


def name_roles(program: Program) -> FactorRoles:
    """Return the role of every factor of every op of an annotated program.

    The first dim of every input is its batch; the second is the sequence where the input holds integers (tokens) or
    has three dims (features a position). Both are followed through the rules; all other roles are the rule's own.
    """
    labels: dict[str, Labels] = {}
    nodes = program.nodes()
    for role in program.inputs:
        value = nodes[role.node].meta.get("val")
        if isinstance(value, torch.Tensor):
            labels[role.node] = _input_labels(value) if role.kind == "input" else ("",) * value.dim()
    out: dict[str, dict[str, str]] = {}
    for node in program.graph.nodes:
        if node.name in labels or "rule" not in node.meta:
            continue
        rule: Rule = node.meta["rule"]
        found = _from_operands(rule, [labels.get(operand.name, ()) for operand in tensor_operands(node)])
        roles = {f.name: found.get(f.name) or f.role for f in rule.factors}
        out[node.name] = {name: role for name, role in roles.items() if role}
        results = [tuple(found.get(name or "", "") for name in dims) for dims in rule.results]
        if node.target in (MICRO_BATCH, JOIN):
            results = [labels.get(node.all_input_nodes[0].name, results[0])]  # the cut dim is still the batch
        if isinstance(node.meta.get("val"), torch.Tensor):
            labels[node.name] = results[0]
            continue
        slots = {index: slot for slot, (index, _) in enumerate(result_values(node))}
        for user in node.users:
            if is_getitem(user) and user.args[1] in slots:
                labels[user.name] = results[slots[user.args[1]]]  # type: ignore[index]
    return out


def _input_labels(value: torch.Tensor) -> Labels:
    has_sequence = value.dim() >= 2 and (not value.dtype.is_floating_point or value.dim() == 3)
    known = ("batch", "sequence") if has_sequence else ("batch",)
    return (*known, *("",) * value.dim())[: value.dim()]


def _from_operands(rule: Rule, operands: list[Labels]) -> dict[str, str]:
    found: dict[str, str] = {}
    for dims, labels in zip(rule.operands, operands):
        for name, label in zip(dims, labels):
            if name is not None and label:
                found.setdefault(name, label)
    return found


def split_names(
    program: Program, choices: Mapping[str, tuple[str, ...]], roles: FactorRoles
) -> dict[str, tuple[str, ...]]:
    """Return what people call the chosen split of every op on each axis; empty where it is replicated."""
    out = {}
    for node in program.ops():
        rule: Rule = node.meta["rule"]
        names = {factor.name for factor in rule.factors}
        known = roles.get(node.name, {})
        out[node.name] = tuple(
            known.get(choice, choice) if choice in names else "" if choice == "replicate" else "partial"
            for choice in choices[node.name]
        )
    return out
