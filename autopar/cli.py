"""The command line: ``autopar plan | show | explain | diff | verify | calibrate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
Pipeline = Annotated[
    str | None, typer.Option(help="the axis along which stages lie; '' for none; by default pp, or what is best")
]
MicroBatches = Annotated[int | None, typer.Option(help="cut the batch into so many parts, one after the other")]
Schedule = Annotated[
    str | None, typer.Option(help="order of the stages' work: gpipe, 1f1b, interleaved_1f1b, zero_bubble or zbv")
]
Cuts = Annotated[
    list[str] | None, typer.Option("--cut", metavar="MODULE", help="where a stage starts; may be given again")
]
BatchNorm = Annotated[str, typer.Option(help="over micro-batches: exact (refused) or per_micro_batch")]
Disable = Annotated[
    list[str] | None, typer.Option("--disable", metavar="PASS", help="leave a graph pass out; may be given again")
]
AtOnce = Annotated[bool, typer.Option("--at-once", help="--memory bounds all that is alive, temporaries too")]
Overlap = Annotated[
    bool | None,
    typer.Option("--overlap/--no-overlap", help="price what can hide as hidden; by default where that is proved best"),
]
OnMeta = Annotated[bool, typer.Option("--meta", help="build the model on the meta device: any size, no memory")]


@app.command("plan")
def plan_command(
    model: Model,
    mesh: MeshSizes = None,
    cluster: ClusterText = None,
    axes: Axes = None,
    device: Device = "cpu",
    links: Links = None,
    pipeline: Pipeline = None,
    memory: Memory = None,
    at_once: AtOnce = False,
    optimizer: Optimizer = "adamw",
    constraint: Constraints = None,
    inputs: Inputs = "global",
    outputs: Outputs = "auto",
    micro_batches: MicroBatches = None,
    schedule: Schedule = None,
    cut: Cuts = None,
    batch_norm: BatchNorm = "exact",
    disable: Disable = None,
    overlap: Overlap = None,
    meta: OnMeta = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="write the plan as JSON")] = None,
) -> None:
    """Find the best plan for MODEL on a mesh, or the best mesh of a cluster too, and show it."""
    if mesh is not None and cluster is not None:
        raise typer.BadParameter("give either --mesh SIZES or --cluster TEXT")
    if cluster is not None and pipeline is not None:
        raise typer.BadParameter("--pipeline names an axis of --mesh; over a --cluster stages are searched")
    grid = cluster if cluster is not None else _parse_mesh(mesh, axes, device, links, pipeline)
    found = _make_plan(
        _load(model, "meta" if meta else None),
        grid,
        constraint,
        memory=memory,
        at_once=at_once,
        optimizer=optimizer,
        inputs=inputs,
        outputs=outputs,
        micro_batches=micro_batches,
        schedule=schedule,
        cuts=cut,
        batch_norm=batch_norm,
        disable=disable or (),
        overlap=overlap,
    )
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
    links: Links = None,
    pipeline: Pipeline = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    constraint: Constraints = None,
    micro_batches: MicroBatches = None,
    schedule: Schedule = None,
    cut: Cuts = None,
    batch_norm: BatchNorm = "exact",
) -> None:
    """Run every rank of a plan in this process, and compare with MODEL on one device: outputs, gradients, a step."""
    if (plan is None) == (mesh is None):
        raise typer.BadParameter("give either --plan FILE or --mesh SIZES")
    case = _load(model, None)
    if plan is not None:
        chosen = _read(plan)
    else:
        grid = _parse_mesh(mesh, axes, device, links, pipeline)
        chosen = _make_plan(
            case,
            grid,
            constraint,
            memory=memory,
            optimizer=optimizer,
            micro_batches=micro_batches,
            schedule=schedule,
            cuts=cut,
            batch_norm=batch_norm,
        )
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


def _parse_mesh(sizes: str | None, axes: str | None, device: str, links: str | None, pipeline: str | None) -> Mesh:
    from autopar.mesh import Mesh

    if sizes is None:
        raise typer.BadParameter("give the mesh: --mesh 2,4")
    parts = sizes.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise MeshError(f"{sizes!r} is no mesh; write the ranks along each axis, such as 2,4")
    return Mesh(tuple(int(part) for part in parts), _names(axes), device, _names(links), pipeline)


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


def _make_plan(case: ModelCase, mesh: Mesh | str, constraints: list[str] | None, **options: Any) -> Plan:
    from autopar.api import plan

    bound = _parse_constraints(constraints or []) or None
    found: Plan = plan(case.model, mesh, case.args, case.kwargs, constraints=bound, **options)
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
