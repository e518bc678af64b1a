"""Write a decision down as a plan."""

from __future__ import annotations

import math

import torch

from autopar.mesh import Mesh
from autopar.placement import layout_name, local_shape
from autopar.plans import CollectiveRow, Cost, MemoryTable, MeshRecord, Options, Plan, Route, SolverReport

from .cost.memory import ParameterBytes, parameter_bytes
from .describe_plan import describe_plan
from .enumerate_strategies import choice_names
from .insert_collectives import arc_bytes
from .name_roles import FactorRoles
from .program import Input, Program
from .redistribution import arc_between
from .solve.decide import Decided
from .solve.layout_graph import decode
from .solve.problem import Network, output_name
from .solve.travel import Travel


def emit_plan(
    program: Program,
    mesh: Mesh,
    options: Options,
    decided: Decided,
    *,
    roles: FactorRoles | None = None,
) -> Plan:
    """Return the plan of a decision.

    Args:
        program, mesh, options: what was asked.
        decided: the answer.
        roles: what a split of each factor is called.
    """
    return describe_plan(program, _Emission(program, mesh, options, decided).plan(), roles)


class _Emission:
    def __init__(self, program: Program, mesh: Mesh, options: Options, decided: Decided) -> None:
        self.program, self.mesh, self.options, self.decided = program, mesh, options, decided
        self.problem = decided.problem
        self.nodes = program.nodes()

    def row(self, name: str) -> int:
        return self.decided.rows[self.problem.tied[name]]

    def result_layout(self, name: str) -> str:
        """Return the layout that an input or an output decision gives."""
        strategies = self.problem.decisions[self.problem.tied[name]].strategies
        return layout_name(decode(int(strategies.results[self.row(name), 0]), self.mesh.num_axes))

    def value(self, name: str) -> torch.Tensor:
        value = self.nodes[name].meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def choices(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for node in self.program.ops():
            strategies = self.problem.decisions[self.problem.tied[node.name]].strategies
            out[node.name] = choice_names(node.meta["rule"], strategies.choices[self.row(node.name)])
        return out

    def parameters(self) -> list[Input]:
        return [role for role in self.program.inputs if role.kind in ("parameter", "buffer")]

    def outputs(self) -> dict[str, str]:
        return {
            output.name: self.result_layout(output_name(position))
            for position, output in enumerate(self.program.outputs)
            if output.kind == "output" and output.node is not None
        }

    def travels(self) -> list[tuple[str, Network, Travel]]:
        """Return every tensor with its network and travel, in graph order."""
        position = {name: i for i, name in enumerate(self.nodes)}
        rows = [
            (name, network, travel)
            for network, travel in zip(self.problem.networks, self.decided.travels, strict=True)
            for name in network.members
        ]
        return sorted(rows, key=lambda row: (position[row[0]], row[1].phase != "forward"))

    def name(self, network: Network, node: int) -> str:
        return layout_name(decode(int(network.graph.layouts[node]), self.mesh.num_axes))

    def routes(self) -> tuple[Route, ...]:
        out = []
        for name, network, travel in self.travels():
            for phase, arcs in ((network.phase, travel.early), ("backward", travel.late)):
                if arcs:
                    steps = tuple((self.name(network, a), self.name(network, b)) for a, b in arcs)
                    out.append(Route(tensor=name, phase=phase, arcs=steps))
        return tuple(out)

    def saved(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(self.name(network, node) for node in travel.saved)
            for name, network, travel in self.travels()
            if travel.saved
        }

    def collectives(self) -> tuple[CollectiveRow, ...]:
        out = []
        for name, network, travel in self.travels():
            for phase, arcs in ((network.phase, travel.early), ("backward", travel.late)):
                out += [self._collective(name, network, phase, *arc) for arc in arcs]
        return tuple(row for row in out if row.kind != "slice")

    def _collective(self, name: str, network: Network, phase: str, source: int, target: int) -> CollectiveRow:
        graph = network.graph
        before, after = (decode(int(graph.layouts[node]), self.mesh.num_axes) for node in (source, target))
        arc = arc_between(before, after)
        assert arc is not None
        return CollectiveRow(
            kind=arc.kind,
            axis=arc.axis,
            tensor=name,
            phase=phase,
            bytes=arc_bytes(graph.shape, graph.itemsize, arc, self.mesh.sizes),
            seconds=graph.seconds_between[source, target],
        )

    def parameter_bytes(self, role: Input) -> ParameterBytes:
        decision = self.problem.decisions[self.problem.tied[role.node]]
        value, sizes = self.value(role.node), self.mesh.sizes
        layout = decode(int(decision.strategies.results[self.row(role.node), 0]), len(sizes))
        shape = local_shape(value.shape, layout, sizes, (0,) * len(sizes))
        optimizer = self.options.optimizer
        return parameter_bytes(math.prod(shape), value.dtype.itemsize, role.requires_grad, optimizer, shape)

    def memory(self) -> MemoryTable:
        rows = [self.parameter_bytes(role) for role in self.program.inputs if role.kind == "parameter"]
        saved = sum(
            travel.saved_bytes(network.graph) * network.multiplicity
            for network, travel in zip(self.problem.networks, self.decided.travels, strict=True)
        )
        return MemoryTable(
            parameters_bytes=sum(row.parameter for row in rows),
            gradients_bytes=sum(row.gradient for row in rows),
            optimizer_bytes=sum(row.optimizer for row in rows),
            buffers_bytes=self.problem.fixed_bytes,
            saved_bytes=saved,
            total_bytes=self.decided.num_bytes,
        )

    def cost(self) -> Cost:
        compute = sum(
            float(decision.strategies.seconds[row]) * decision.multiplicity * (2 if again else 1)
            for decision, row, again in zip(self.problem.decisions, self.decided.rows, self.decided.again, strict=True)
        )
        step, hidden = self.decided.seconds, self.decided.hidden_seconds
        return Cost(
            step_seconds=step,
            compute_seconds=compute,
            communication_seconds=step - compute + hidden,
            hidden_seconds=hidden,
        )

    def solver(self) -> SolverReport:
        answer = self.decided.answer
        gap = max(0.0, answer.objective - answer.bound) / max(abs(answer.objective), 1e-30)
        return SolverReport(
            status=answer.status,
            objective_s=answer.objective,
            bound_s=answer.bound,
            gap=gap,
            seconds=answer.seconds,
            variables=self.decided.num_variables,
            constraints=self.decided.num_rows,
            regions=self.problem.num_regions,
            next_gb_s=answer.byte_s * 1e9,
        )

    def plan(self) -> Plan:
        mesh, choices = self.mesh, self.choices()
        return Plan(
            fingerprint=self.program.fingerprint(),
            mesh_record=MeshRecord(sizes=mesh.sizes, names=mesh.names, device=mesh.device, links=mesh.links),
            options=self.options,
            choices=choices,
            parameters={role.name: self.result_layout(role.node) for role in self.parameters()},
            inputs={role.name: self.result_layout(role.node) for role in self.program.inputs if role.kind == "input"},
            outputs=self.outputs(),
            routes=self.routes(),
            saved=self.saved(),
            recomputed=tuple(n.name for n in self.program.ops() if self.decided.again[self.problem.tied[n.name]]),
            cost=self.cost(),
            memory=self.memory(),
            collectives=self.collectives(),
            solver=self.solver(),
        )
