"""Plans written by hand, for tests of what is done with a plan; ``two_axis_plan`` looks like a small decoder's."""

from __future__ import annotations

from typing import Any

from autopar.plans import CollectiveRow, Cost, MemoryTable, MeshRecord, Options, Plan, Route, SolverReport

FINGERPRINT = "5f" * 32


def small_plan(**changes: Any) -> Plan:
    """Return a plan of one linear layer on two ranks, with the fields in ``changes`` replaced."""
    fields: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "mesh_record": MeshRecord(sizes=(2,), names=("data",), device="cpu"),
        "options": Options(),
        "choices": {"contract": ("b",), "sum_1": ("b",)},
        "parameters": {"weight": "R"},
        "inputs": {"args[0]": "R"},
        "outputs": {"": "R"},
        "routes": (Route(tensor="sum_1", phase="forward", arcs=(("P", "R"),)),),
        "saved": {"contract": ("S0",)},
        "cost": Cost(step_seconds=0.003, compute_seconds=0.002, communication_seconds=0.001),
        "memory": MemoryTable(
            parameters_bytes=4000, gradients_bytes=4000, optimizer_bytes=8000, buffers_bytes=0, saved_bytes=100,
            total_bytes=16100,
        ),
        "collectives": (
            CollectiveRow(
                kind="all_reduce", axis=0, tensor="sum_1", phase="forward", bytes=4, seconds=0.001, reason="the loss"
            ),
        ),
        "solver": SolverReport(
            status="optimal", objective_s=0.003, bound_s=0.003, gap=0.0, seconds=0.1, variables=12, constraints=8
        ),
        "parameter_shapes": {"weight": (8, 8)},
    }  # fmt: skip
    return Plan(**{**fields, **changes})


def two_axis_plan(num_layers: int = 4, memory: int | None = 40_000_000_000) -> Plan:
    """Return a plan of ``num_layers`` feed-forward layers on (data 4, model 2): column, row, and ZeRO-3 over data."""
    choices: dict[str, tuple[str, ...]] = {"embedding": ("b", "replicate")}
    roles: dict[str, tuple[str, ...]] = {"embedding": ("batch", "")}
    modules = {"embedding": "embed"}
    phases = {"embedding": "forward"}
    parameters = {"embed.weight": "R,R"}
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (50257, 512)}
    placeholders = {"embed.weight": "embed_weight", "args[0]": "args_0"}
    gradients = {"embed.weight": "embedding_dense_backward"}
    routes: list[Route] = [Route(tensor="embedding_dense_backward", phase="backward", arcs=(("P,R", "R,R"),))]
    rows: list[CollectiveRow] = [
        CollectiveRow(
            kind="all_reduce", axis=0, tensor="embedding_dense_backward", phase="backward", bytes=102_926_336,
            seconds=0.004, reason="the gradient of embed.weight",
        )
    ]  # fmt: skip
    choices["embedding_dense_backward"], roles["embedding_dense_backward"] = ("b", "replicate"), ("batch", "")
    modules["embedding_dense_backward"], phases["embedding_dense_backward"] = "embed", "backward"

    for layer in range(num_layers):
        for index, (name, role, factor, layout, shape) in enumerate(
            (("up", "column", "n", "S1,S0", (2048, 512)), ("down", "row", "k", "S0,S1", (512, 2048)))
        ):
            number = 2 * layer + index
            path = f"layers.{layer}.mlp.{name}"
            placeholder = f"layers_{layer}_mlp_{name}_weight"
            forward, backward = f"contract_{number}", f"contract_{100 + number}"
            choices[forward], roles[forward], phases[forward] = ("a", factor), ("batch", role), "forward"
            choices[backward], roles[backward], phases[backward] = ("a", factor), ("batch", role), "backward"
            modules[forward] = modules[backward] = path
            parameters[f"{path}.weight"], shapes[f"{path}.weight"] = layout, shape
            placeholders[f"{path}.weight"], gradients[f"{path}.weight"] = placeholder, backward
            whole = f"R,{layout[3:]}"
            for phase in ("forward", "backward"):
                routes.append(Route(tensor=placeholder, phase=phase, arcs=((layout, whole),)))
                rows.append(
                    CollectiveRow(
                        kind="all_gather", axis=0, tensor=placeholder, phase=phase, bytes=524_288, seconds=0.0002,
                        reason=f"gathered over data: wanted whole by {path} ({role})",
                    )
                )  # fmt: skip
            routes.append(Route(tensor=backward, phase="backward", arcs=((f"P,{layout[3:]}", layout),)))
            rows.append(
                CollectiveRow(
                    kind="reduce_scatter", axis=0, tensor=backward, phase="backward", bytes=2_097_152, seconds=0.0002,
                    reason=f"the gradient of {path}.weight",
                )
            )  # fmt: skip
    return small_plan(
        mesh_record=MeshRecord(sizes=(4, 2), names=("data", "model"), device="h100"),
        options=Options(memory=memory, constraints={"layers.*.mlp.up": "column@model"}),
        choices=choices,
        roles=roles,
        modules=modules,
        phases=phases,
        parameters=parameters,
        parameter_shapes=shapes,
        placeholders=placeholders,
        gradients=gradients,
        inputs={"args[0]": "R,R"},
        outputs={"['loss']": "R,R", "['logits']": "S0,R"},
        routes=tuple(routes),
        saved={f"contract_{number}": ("S0,S2",) for number in range(2 * num_layers)},
        collectives=tuple(rows),
        cost=Cost(step_seconds=0.0123, compute_seconds=0.0101, communication_seconds=0.0022),
        memory=MemoryTable(
            parameters_bytes=12_000_000_000,
            gradients_bytes=12_000_000_000,
            optimizer_bytes=8_000_000_000,
            buffers_bytes=0,
            saved_bytes=1_234_567_890,
            total_bytes=33_234_567_890,
        ),
        solver=SolverReport(
            status="optimal",
            objective_s=0.0123,
            bound_s=0.0123,
            gap=0.0,
            seconds=0.41,
            variables=7012,
            constraints=5120,
            regions=2,
        ),
    )
