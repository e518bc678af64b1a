"""The command line: ``autopar plan | show | explain | diff | verify | calibrate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import AutoparError, ConstraintError, MeshError

if TYPE_CHECKING:
    from autopar.load_model import ModelCase
    from autopar.mesh import Mesh
    from autopar.plans import Plan

app = typer.Typer(
    help="Split an ordinary PyTorch model over a device mesh, in the way that costs least.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:function or path/file.py:function; it returns (model, args) or (model, args, kwargs)",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a file that autopar plan --save or Plan.save wrote")]
MeshSizes = Annotated[str | None, typer.Option("--mesh", help="ranks along each axis, the slowest first: 2,4")]
ClusterText = Annotated[
    str | None, typer.Option("--cluster", help="instead of --mesh: nodes x devices, whose mesh is searched: '4x8 h100'")
]
Axes = Annotated[str | None, typer.Option(help="names of the axes: data,model")]
Device = Annotated[str, typer.Option(help="device profile that prices the plan: cpu, a100, h100, ...")]
Links = Annotated[str | None, typer.Option(help="link profile of each axis; by default the device's own")]
Memory = Annotated[str | None, typer.Option(help="budget of each rank: 40GB, 40GiB or bytes")]
Optimizer = Annotated[str, typer.Option(help="optimizer whose state is counted: adamw, sgd, ...")]
Constraints = Annotated[
    list[str] | None,
    typer.Option("--constraint", metavar="PATTERN=TECHNIQUE", help="layers.*.mlp.up=column; may be given again"),
]
Inputs = Annotated[str, typer.Option(help="global: each rank passes the whole batch; local: its share of it")]
Outputs = Annotated[str, typer.Option(help="full tensors, or where they lie beside a loss: auto, full, lie")]
OnMeta = Annotated[bool, typer.Option("--meta", help="build the model on the meta device: any size, no memory")]


@app.command("plan")
def plan_command(
    model: Model,
    mesh: MeshSizes = None,
    cluster: ClusterText = None,
    axes: Axes = None,
    device: Device = "cpu",
    links: Links = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    constraint: Constraints = None,
    inputs: Inputs = "global",
    outputs: Outputs = "auto",
    meta: OnMeta = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="write the plan as JSON")] = None,
) -> None:
    """Find the best plan for MODEL on a mesh, or the best mesh of a cluster too, and show it."""
    if mesh is not None and cluster is not None:
        raise typer.BadParameter("give either --mesh SIZES or --cluster TEXT")
    grid = cluster if cluster is not None else _parse_mesh(mesh, axes, device, links)
    case = _load(model, "meta" if meta else None)
    found = _make_plan(case, grid, memory, optimizer, constraint or [], inputs, outputs)
    typer.echo(str(found))
    if save is not None:
        found.save(save)
        typer.echo(f"\nwritten to {save}")


@app.command("show")
def show_command(plan: PlanFile) -> None:
    """Show a saved plan."""
    typer.echo(str(_read(plan)))


@app.command("explain")
def explain_command(
    plan: PlanFile,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a module, parameter, input, output or op of the plan")],
) -> None:
    """Say what a plan does with one module, parameter or op, and why."""
    typer.echo(_read(plan).explain(name))


@app.command("diff")
def diff_command(before: PlanFile, after: PlanFile) -> None:
    """Show what two saved plans do differently."""
    typer.echo(_read(before).diff(_read(after)))


@app.command("verify")
def verify_command(
    model: Model,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the plan; without it one is made for --mesh")
    ] = None,
    mesh: MeshSizes = None,
    axes: Axes = None,
    device: Device = "cpu",
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    constraint: Constraints = None,
) -> None:
    """Run every rank of a plan in this process, and compare with MODEL on one device: outputs, gradients, a step."""
    if (plan is None) == (mesh is None):
        raise typer.BadParameter("give either --plan FILE or --mesh SIZES")
    case = _load(model, None)
    if plan is not None:
        chosen = _read(plan)
    else:
        grid = _parse_mesh(mesh, axes, device, None)
        chosen = _make_plan(case, grid, memory, optimizer, constraint or [], "global", "auto")
    from autopar.api import verify

    verify(case.model, chosen, case.args, case.kwargs)
    typer.echo(f"{model} on {chosen.mesh}: equal to one device")


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="the profile to write, as JSON")],
    device: Annotated[str, typer.Option(help="where to measure: cpu or cuda")] = "cpu",
    seconds: Annotated[float, typer.Option(help="how long products and collectives may take")] = 60.0,
) -> None:
    """Measure this machine and write a device profile; under torchrun, the collectives between its processes too.

    The path of the file is then a device name: autopar plan MODEL --mesh 4 --device FILE.
    """
    from autopar.runtime.calibrate import calibrate_processes

    if output.suffix != ".json":
        raise typer.BadParameter(f"{output} must end in .json: the ending marks a device name as a profile's path")
    profile = calibrate_processes(device, seconds, str(output))
    if profile is None:
        return
    typer.echo(profile)


def _parse_mesh(sizes: str | None, axes: str | None, device: str, links: str | None) -> Mesh:
    from autopar.mesh import Mesh

    if sizes is None:
        raise typer.BadParameter("give the mesh: --mesh 2,4")
    parts = sizes.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise MeshError(f"{sizes!r} is no mesh; write the ranks along each axis, such as 2,4")
    return Mesh(tuple(int(part) for part in parts), _names(axes), device, _names(links))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _parse_constraints(texts: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for text in texts:
        pattern, equals, technique = text.partition("=")
        if not equals or not pattern or not technique:
            raise ConstraintError(f"{text!r} is no constraint; write PATTERN=TECHNIQUE, such as layers.*.mlp.up=column")
        if pattern in out:
            raise ConstraintError(f"{pattern!r} is constrained twice: {out[pattern]!r} and {technique!r}; keep one")
        out[pattern] = technique
    return out


def _load(model: str, device: str | None) -> ModelCase:
    from autopar.load_model import load_model

    return load_model(model, device)


def _read(path: Path) -> Plan:
    from autopar.plans import Plan

    return Plan.load(path)


def _make_plan(
    case: ModelCase,
    mesh: Mesh | str,
    memory: str | None,
    optimizer: str,
    constraints: list[str],
    inputs: str,
    outputs: str,
) -> Plan:
    from autopar.api import plan

    found: Plan = plan(
        case.model,
        mesh,
        case.args,
        case.kwargs,
        optimizer=optimizer,
        memory=memory,
        constraints=_parse_constraints(constraints) or None,
        inputs=inputs,
        outputs=outputs,
    )
    return found


def main() -> None:
    """Run the command line; an error of autopar is one line on stderr and exit code 1, a wrong call exit code 2."""
    try:
        app()
    except AutoparError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
