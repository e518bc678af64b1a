"""Turn what a user asked of modules and parameters into rows that their strategies may take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from torch import fx

from autopar.errors import ConstraintError, MeshError, PlanError
from autopar.mesh import Mesh
from autopar.placement import REPLICATE, Layout, is_shard, parse_layout

from .enumerate_strategies import Strategies
from .name_roles import FactorRoles
from .program import Input, Program, tensor_operands
from .redistribution import layout_is_legal
from .rules.rule import Rule
from .solve.layout_graph import Bools, decode, encode

REPLICATED = "replicate"
WHOLE, SPLIT = "zero0", "zero3"
OP_PREFIX = "op:"


@dataclass(frozen=True)
class Demand:
    """One constraint on one op or parameter.

    Attributes:
        pattern: the user's own, for messages; two nodes of which the same is asked by two patterns decide together.
        text: what was asked.
        choices: indices of the rule's choices that satisfy it (ops).
        axis: the axis on which it must hold; None for any (or, for ``replicate``, for all).
        layout: where a parameter must rest (parameters).
        num_axes: of the mesh (parameters that shall rest split or whole).
    """

    pattern: str = field(compare=False)
    text: str
    choices: tuple[int, ...] = ()
    axis: int | None = None
    layout: Layout | None = None
    num_axes: int = 0


@dataclass
class Constraints:
    """The demands on every node.

    Attributes:
        demands: by the name of an op or placeholder.
        labels: what an op or placeholder is called in messages.
    """

    mesh: Mesh
    demands: dict[str, list[Demand]] = field(default_factory=lambda: defaultdict(list))
    labels: Mapping[str, str] = field(default_factory=dict)

    def key(self, name: str) -> Hashable:
        """Return what must be equal for two nodes to decide together; None for a free node."""
        return tuple(self.demands[name]) if name in self.demands else None

    def rows(self, name: str, strategies: Strategies) -> Bools | None:
        """Return the rows that a node may take, None for all.

        Raises:
            ConstraintError: there is none.
        """
        if name not in self.demands:
            return None
        rows = np.ones(len(strategies), dtype=np.bool_)
        for demand in self.demands[name]:
            rows &= _satisfied(demand, strategies)
            if not rows.any():
                raise ConstraintError(
                    f"the constraint {demand.pattern!r}: {demand.text!r} can't be met by "
                    f"{self.labels.get(name, name)} on {self.mesh}: sizes do not divide so, or another constraint says "
                    "otherwise"
                )
        return rows


def _satisfied(demand: Demand, strategies: Strategies) -> Bools:
    if demand.layout is not None:
        return np.asarray(strategies.results[:, 0] == encode(demand.layout))
    if demand.text in (WHOLE, SPLIT):
        return _resting(demand, strategies)
    hits = np.isin(strategies.choices, demand.choices)
    if demand.axis is not None:
        return np.asarray(hits[:, demand.axis])
    return np.asarray(hits.all(axis=1) if demand.text == REPLICATED else hits.any(axis=1))


def _resting(demand: Demand, strategies: Strategies) -> Bools:
    """Return the layouts that are split (or whole) on the axis, or on any (all) without one."""
    out = []
    for code in strategies.results[:, 0].tolist():
        layout = decode(code, demand.num_axes)
        codes = layout if demand.axis is None else (layout[demand.axis],)
        out.append(any(map(is_shard, codes)) if demand.text == SPLIT else not any(map(is_shard, codes)))
    return np.array(out, dtype=np.bool_)


def apply_constraints(program: Program, mesh: Mesh, constraints: Mapping[str, str], roles: FactorRoles) -> Constraints:
    """Return the demands that ``constraints`` make on a program.

    A pattern is matched (as by ``fnmatch``) against module paths and parameter names, ``op:<pattern>`` against the
    names of ops. What is asked is one of these, or several with semicolons between:

    - ``column``, ``row``, ``batch``, ``sequence``, ``head``, ``vocab``, ``replicate`` or a factor's name binds the
      forward ops of the modules (or those that read the parameter, or the named ops) that have such a choice;
      ``@axis`` after it says on which axis, otherwise one axis at least must split so;
    - ``zero3`` and ``zero0``: parameters rest split, or whole, on the axis after ``@``, otherwise on one axis at least
      (on all); ``zero3`` leaves out those that are too small to be split;
    - a layout such as ``S0,R``: parameters rest so.

    Raises:
        ConstraintError: nothing matches, or no matched op has such a choice.
    """
    labels = {role.node: role.name for role in program.inputs}
    labels |= {node.name: f"{node.name} of {node.meta['module']}" for node in program.ops() if node.meta["module"]}
    out = Constraints(mesh, labels=labels)
    for pattern, text in constraints.items():
        for part in map(str.strip, text.split(";")):
            layout = _as_layout(part, mesh, pattern)
            if layout is not None:
                _bind_layout(program, pattern, part, layout, out)
            elif part.partition("@")[0] in (WHOLE, SPLIT):
                _bind_resting(program, pattern, part, out)
            else:
                _bind_ops(program, pattern, part, roles, out)
    return out


def _as_layout(text: str, mesh: Mesh, pattern: str) -> Layout | None:
    try:
        layout = parse_layout(text)
    except PlanError:
        return None
    if len(layout) != mesh.num_axes or any(code < REPLICATE for code in layout):
        raise ConstraintError(
            f"the constraint {pattern!r}: {text!r} must name S<dim> or R for each of the {mesh.num_axes} axes of {mesh}"
        )
    return layout


def _bind_layout(program: Program, pattern: str, text: str, layout: Layout, out: Constraints) -> None:
    placeholders = program.nodes()
    for role in _matched_parameters(program, pattern, text):
        num_dims = placeholders[role.node].meta["val"].dim()
        if max(layout) >= num_dims:
            raise ConstraintError(
                f"the constraint {pattern!r}: {text!r} splits dim {max(layout)} of {role.name}, which has "
                f"{num_dims} dim{'' if num_dims == 1 else 's'}; name its parameters more narrowly"
            )
        out.demands[role.node].append(Demand(pattern, text, layout=layout))


def _bind_resting(program: Program, pattern: str, text: str, out: Constraints) -> None:
    word, _, axis_name = text.partition("@")
    axis = _axis(out.mesh, axis_name, pattern, text) if axis_name else None
    placeholders, mesh = program.nodes(), out.mesh
    axes = range(mesh.num_axes) if axis is None else (axis,)
    bound = False
    matched = _matched_parameters(program, pattern, text)
    for role in matched:
        shape = tuple(placeholders[role.node].meta["val"].shape)
        if word == WHOLE or any(_can_split(shape, mesh, a) for a in axes):
            out.demands[role.node].append(Demand(pattern, word, axis=axis, num_axes=mesh.num_axes))
            bound = True
    if not bound:
        names = ", ".join(mesh.names[a] for a in axes)
        raise ConstraintError(
            f"the constraint {pattern!r}: {text!r} asks to split parameters over {names}, but each of the "
            f"{len(matched)} that match has fewer than so many elements in every dim; leave it out"
        )


def _can_split(shape: tuple[int, ...], mesh: Mesh, axis: int) -> bool:
    whole = (REPLICATE,) * mesh.num_axes
    ends = ((*whole[:axis], dim, *whole[axis + 1 :]) for dim in range(len(shape)))
    return mesh.sizes[axis] > 1 and any(layout_is_legal(shape, layout, mesh.sizes) for layout in ends)


def _matched_parameters(program: Program, pattern: str, text: str) -> list[Input]:
    parameters = [role for role in program.inputs if role.kind == "parameter"]
    matched = [role for role in parameters if any(fnmatchcase(name, pattern) for name in (role.name, *role.aliases))]
    if not matched:
        names = [role.name for role in parameters]
        raise ConstraintError(f"the constraint {pattern!r}: {text!r} matches no parameter; there are {_some(names)}")
    return matched


def _bind_ops(program: Program, pattern: str, text: str, roles: FactorRoles, out: Constraints) -> None:
    technique, _, axis_name = text.partition("@")
    axis = _axis(out.mesh, axis_name, pattern, text) if axis_name else None
    matched = _matched_ops(program, pattern)
    if not matched and pattern.startswith(OP_PREFIX):
        names = [node.name for node in program.ops() if node.meta["phase"] == "forward"]
        raise ConstraintError(
            f"the constraint {pattern!r}: {text!r} matches no op of the forward; there are {_some(names)}"
        )
    if not matched:
        modules = list(dict.fromkeys(str(node.meta["module"]) for node in program.ops() if node.meta["module"]))
        raise ConstraintError(
            f"the constraint {pattern!r}: {text!r} matches neither a module nor a parameter; "
            f"modules are {_some(modules)}"
        )
    offered: dict[str, None] = {}
    bound = False
    for node in matched:
        choices, words = _choices(node, technique, roles.get(node.name, {}))
        offered.update(words)
        if choices:
            out.demands[node.name].append(Demand(pattern, technique, choices, axis))
            bound = True
    if not bound:
        raise ConstraintError(
            f"the constraint {pattern!r}: {text!r} asks for what none of the {len(matched)} matching ops can do; "
            f"they can be split by {_some(list(offered))}"
        )


def _axis(mesh: Mesh, name: str, pattern: str, text: str) -> int:
    try:
        return mesh.axis(name)
    except MeshError as error:
        raise ConstraintError(f"the constraint {pattern!r}: {text!r} names an unknown axis: {error}") from error


def _matched_ops(program: Program, pattern: str) -> list[fx.Node]:
    forward = [node for node in program.ops() if node.meta["phase"] == "forward"]
    if pattern.startswith(OP_PREFIX):
        return [node for node in forward if fnmatchcase(node.name, pattern.removeprefix(OP_PREFIX))]
    parameters = {
        role.node
        for role in program.inputs
        if role.kind == "parameter" and any(fnmatchcase(name, pattern) for name in (role.name, *role.aliases))
    }
    return [
        node
        for node in forward
        if fnmatchcase(node.meta["module"], pattern)
        or any(operand.name in parameters for operand in tensor_operands(node))
    ]


def _choices(node: fx.Node, technique: str, roles: Mapping[str, str]) -> tuple[tuple[int, ...], dict[str, None]]:
    """Return the choices of an op that are called ``technique``, and the words for all it has."""
    rule: Rule = node.meta["rule"]
    hits, words = [], {REPLICATED: None}
    for index, choice in enumerate(rule.choices()):
        names = {choice.name}
        if choice.factor is not None:
            word = roles.get(choice.factor.name) or choice.factor.role
            names |= {word, choice.factor.role} - {""}
            words[word or choice.name] = None
        if technique in names:
            hits.append(index)
    return tuple(hits), words


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:12])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 12 else shown or "none"
