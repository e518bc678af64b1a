"""Predicted against measured memory of lowered programs, and memory a rank by ZeRO stage and number of ranks.

    python benchmarks/memory.py                                  # all models, all plans, both tables
    python benchmarks/memory.py --model gpt2 --ranks 4 --json rows.json

Nothing is timed. A simulated rank runs a whole step (forward, backward; optimizer state is there) as the executor does,
and every tensor storage is followed; ``predicted`` comes from the lowered program alone. The second table trains a
16-bit model with float32 masters and shows how the bytes of a rank fall with its number (Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3: 16 bytes a parameter on one device;
4 + 12 / N, 2 + 14 / N and 16 / N in stages 1, 2 and 3). Stage 1 is measured in two micro-batches; in stages 1 and 2 the
pieces of parameters lie beside gathered copies, 2 / N bytes more than the formula.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.cost.live_bytes import live_bytes
from autopar.passes.cost.storages import LiveBytes
from autopar.passes.fold import fold
from autopar.passes.lower import lower
from autopar.passes.name_roles import name_roles
from autopar.passes.pipeline import make_plan
from autopar.passes.pipeline_plan import choose_pipeline, cut_program
from autopar.passes.program import Program, is_getitem
from autopar.passes.rules.micro_batches import OVER
from autopar.passes.segments import cut_segments
from autopar.placement import REPLICATE, Layout, parse_layout
from autopar.plans import Options, Plan
from autopar.runtime.measure_memory import MakeOptimizer, measure_rank
from autopar.runtime.pipeline_memory import measure_staged_rank, staged_live_bytes

STAGES = ("zero0", "zero1", "zero2", "zero3")
PLANS = ("best", "zero0", "zero2", "zero3", "zero0 again", "zero2 again", "zero3 again")
PER_PARAMETER: dict[str, Callable[[int], float]] = {
    "zero0": lambda n: 16.0,
    "zero1": lambda n: 4.0 + 12.0 / n,
    "zero2": lambda n: 2.0 + 14.0 / n,
    "zero3": lambda n: 16.0 / n,
}
"""Bytes of model states for each parameter by the number of ranks, with 16-bit training and Adam."""

SIZES: dict[str, dict[str, int]] = {
    "mlp": {"width": 64, "hidden": 256, "batch": 64},
    "resnet": {"width": 16, "batch": 16},
    "vit": {"width": 64, "batch": 16, "layers": 4},
    **{name: {"width": 64, "batch": 8, "length": 32, "layers": 4} for name in ("bert", "gpt2", "llama", "t5")},
}
"""Sizes of the models of the test set here: activations and parameters of the same order."""

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class MixedAdamW(torch.optim.AdamW):
    """AdamW on float32 masters of 16-bit parameters: what ``adamw-mixed`` counts."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.masters = [parameter.detach().float() for parameter in parameters]
        self.parameters = parameters
        super().__init__(self.masters)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the masters by the 16-bit gradients and write them back."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.data.copy_(master)
            master.grad = None
            self.state[master]["master"] = master


class Stack(nn.Module):
    """Layers with many more parameters than activations."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss of ``x`` ``[batch, width]``."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def values_of(program: Program, built: Built) -> dict[str, Tensor]:
    """Return the global value of every placeholder but the tangents."""
    model, args, kwargs = built
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    leaves = pytree.tree_leaves((args, kwargs))
    roles = [role for role in program.inputs if role.kind != "tangent"]
    return {role.node: leaves[role.index] if role.kind == "input" else state[role.name].detach() for role in roles}


def plan_of(program: Program, ranks: int, name: str, optimizer: str) -> Plan:
    """Return the plan called ``name``: ``best``, or a ZeRO stage, whose forward is computed again with ``again``.

    Every op that can be is split over the batch. Parameters rest whole (``zero0``) or in pieces; their gathered copies
    are kept for the backward (``zero2``) or gathered again there (``zero3``).
    """
    mesh = Mesh((ranks,), ("data",), device="cpu")
    stage, _, again = name.partition(" ")
    rest = "" if ranks == 1 or stage == "best" else "batch; zero0" if stage == "zero0" else "batch; zero3"
    options = Options(constraints={"*": rest} if rest else {}, optimizer=optimizer)
    plan = make_plan(program, mesh, options)
    if stage == "best":
        return plan
    parameters = {role.node for role in program.inputs if role.kind == "parameter"}

    def pick_saved(tensor: str, had: Sequence[Layout]) -> Sequence[Layout]:
        return had if stage == "zero2" and tensor in parameters else had[:1]

    layouts = {parameter: parse_layout(text) for parameter, text in plan.parameters.items()}
    recomputed = inside_segments(program) if again else []
    return complete_plan(
        program, mesh, plan.choices, layouts, options=options, pick_saved=pick_saved, recomputed=recomputed
    )


def inside_segments(program: Program) -> list[str]:
    """Return the forward ops that only their own segment reads: with them computed again, the boundaries are saved."""
    segments = cut_segments(program, fold(program))

    def readers(node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if is_getitem(user):
                yield from readers(user)
            elif user.name in segments:
                yield user

    inside = []
    for node in program.ops():
        segment = segments.get(node.name)
        if segment is not None and all(segments[reader.name] == segment for reader in readers(node)):
            inside.append(node.name)
    return inside


def measure(
    program: Program, built: Built, ranks: int, name: str, optimizer: str, make: MakeOptimizer
) -> dict[str, Any]:
    """Predict and measure the first rank under a plan; return one row."""
    local = lower(program, plan_of(program, ranks, name, optimizer), (0,), run=False)
    return _row(live_bytes(local, optimizer), measure_rank(local, values_of(program, built), make))


def measure_stage(program: Program, built: Built, ranks: int, stage: str) -> dict[str, Any]:
    """Predict and measure the first rank with every op split over the batch, the backward's too; return one row.

    Stage 1 runs in two micro-batches: parameters are gathered once, gradients add up whole and are reduced once.
    """
    mesh, parts = Mesh((ranks,), ("data",), device="cpu"), 2 if stage == "zero1" else None
    ahead = ("bucket_collectives", "issue_early", "wait_late")  # hold more than the paper counts
    options = Options(optimizer="adamw-mixed", micro_batches=parts, disable=ahead)
    record = choose_pipeline(program, mesh, options)
    cut = annotate(cut_program(program, record, options.outputs)) if parts else program
    parameters = {role.node for role in cut.inputs if role.kind == "parameter"}
    rest: Layout = (REPLICATE,) if stage == "zero0" or ranks == 1 else (0,)
    plan = complete_plan(
        cut,
        mesh,
        batch_choices(cut) if ranks > 1 else {},
        {role.name: rest for role in cut.inputs if role.kind == "parameter"},
        options=options,
        pick_saved=lambda name, had: had if stage in ("zero1", "zero2") and name in parameters else had[:1],
    )
    values = values_of(program, built)
    if parts:
        plan = msgspec.structs.replace(plan, pipeline=record)
        return _row(staged_live_bytes(cut, plan), measure_staged_rank(cut, plan, values, MixedAdamW))
    local = lower(cut, plan, (0,), run=False)
    return _row(live_bytes(local, options.optimizer), measure_rank(local, values, MixedAdamW))


def batch_choices(program: Program) -> dict[str, tuple[str, ...]]:
    """Return the split over the batch of every op that has one, on one axis; partial gradients add up partial."""
    roles = name_roles(program)
    out: dict[str, tuple[str, ...]] = {}
    for node in program.ops():
        known = roles.get(node.name, {})
        names = [factor.name for factor in node.meta["rule"].factors if known.get(factor.name) == "batch"]
        out[node.name] = (names[0] if names else "replicate",)
        if node.target == OVER and out[node.all_input_nodes[0].name] != ("replicate",):
            out[node.name] = ("partial(sum):0",)
    return out


def _row(predicted: LiveBytes, measured: LiveBytes) -> dict[str, Any]:
    return {
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured.peak_bytes,
        "error": predicted.peak_bytes / measured.peak_bytes - 1,
        "at": measured.at,
        "parts": measured.parts,
        "largest_gather_bytes": predicted.largest_gather_bytes,
    }


def model_rows(names: list[str], ranks: int) -> list[dict[str, Any]]:
    """Return a row for every model of the test set under every plan."""
    from tests.models import MODELS

    rows = []
    for name in names or sorted(MODELS):
        built = MODELS[name](dropout=0.1, **SIZES[name])
        model, args, kwargs = built
        program = annotate(capture(model, args, kwargs))
        for plan in PLANS:
            row = measure(program, built, ranks, plan, "adamw", torch.optim.AdamW)
            rows.append({"model": name, "plan": plan, "ranks": ranks, **row})
            print(_line(rows[-1]), flush=True)
    return rows


def zero_rows(depth: int, width: int) -> list[dict[str, Any]]:
    """Return a row for every ZeRO stage on 1, 2, 4 and 8 ranks: bytes a parameter, beside the formula's."""
    model = Stack(depth, width).to(torch.bfloat16)
    built: Built = (model, (torch.randn(16, width, dtype=torch.bfloat16),), {})
    program = annotate(capture(model, built[1], {}))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = []
    for stage in STAGES:
        for ranks in (1, 2, 4, 8):
            row = measure_stage(program, built, ranks, stage)
            row |= {"model": f"{depth} x {width}", "plan": stage, "ranks": ranks}
            row["bytes_per_parameter"] = row["measured_bytes"] / parameters
            row["formula"] = PER_PARAMETER[stage](ranks)
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:<10} {row['plan']:<11} {row['ranks']:>2} ranks  "
    tail = f"predicted {row['predicted_bytes']:>12,}  measured {row['measured_bytes']:>12,}  {row['error']:+.2%}"
    if "formula" in row:
        tail += f"  {row['bytes_per_parameter']:6.2f} bytes a parameter, the paper's {row['formula']:.2f}"
    return f"{head}{tail}  at {row['at']}"


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="of the test set; all by default")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--depth", type=int, default=16, help="layers of the model of the second table")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(arguments)
    models = model_rows(given.model, given.ranks)
    zero = zero_rows(given.depth, given.width)
    errors = [abs(row["error"]) for row in models + zero]
    print(f"{len(errors)} rows, worst error {max(errors):.2%}")
    if given.json:
        given.json.write_text(json.dumps({"models": models, "zero": zero}, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
