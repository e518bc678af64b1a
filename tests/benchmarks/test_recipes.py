"""Hand-written recipes: pairs are found in any model, and each recipe's plan is what its name says."""

from __future__ import annotations

import pytest
import torch

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.name_roles import name_roles
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from benchmarks.models import families
from benchmarks.models.transformer import Transformer, TransformerConfig
from benchmarks.pair_products import pair_products
from benchmarks.recipes import RECIPES, Inexpressible, recipe_constraints

MESH = Mesh((2, 2), ("data", "model"), "h100", ("infiniband_400", "nvlink4"))
CONFIG = TransformerConfig(2, 32, 4, 2, 8, 64, 48, 8, gated=True, rms_norm=True, rotary=True, tied=False)
IDS = torch.int64


def captured(model: torch.nn.Module, *inputs: tuple[tuple[int, ...], torch.dtype]) -> Program:
    """Return the annotated program of a model on inputs of these shapes."""
    with torch.device("meta"):
        args = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in inputs)
    return annotate(capture(model.to("meta"), args, {}))


@pytest.fixture(scope="module")
def llama() -> Program:
    """Return a decoder with grouped heads."""
    return captured(Transformer(CONFIG), ((4, 8), IDS), ((4, 8), IDS))


def modules_of(program: Program, names: set[str]) -> set[str]:
    """Return the last part of the module path of these ops."""
    return {node.meta["module"].rpartition(".")[2] for node in program.ops() if node.name in names}


def planned(program: Program, title: str, mesh: Mesh = MESH) -> Plan:
    """Return the plan of the recipe with this title."""
    recipe = next(recipe for recipe in RECIPES if recipe.title == title)
    return make_plan(program, mesh, Options(constraints=recipe_constraints(program, mesh, recipe)))


def test_pairs_of_a_decoder(llama: Program) -> None:
    """Heads and the gated feed-forward close at their row; the head and the table of tokens stand alone."""
    pairs = pair_products(llama, name_roles(llama), 2)
    assert modules_of(llama, pairs.rows) == {"o_proj", "down_proj"}
    columns = set(pairs.factors) - pairs.rows
    assert modules_of(llama, columns) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "head", "embedding"}
    assert any("attention" in name for name in pairs.inside)
    assert not pair_products(llama, name_roles(llama), 3).rows


def test_pairs_of_a_residual_network() -> None:
    """Convolutions pair through batch norm; what a residual is added to is no pair."""
    program = captured(families.ResNet((1,), 8, 10), ((4, 3, 16, 16), torch.float32), ((4,), IDS))
    pairs = pair_products(program, name_roles(program), 2)
    assert pairs.rows
    assert all("convolution" in name for name in pairs.rows)


def test_a_router_is_left_alone() -> None:
    """A product whose columns end in no row and which is not the last is not split; experts' products pair."""
    program = captured(families.ExpertDecoder(1, 16, 2, 32, 4, 24, 8), ((4, 8), IDS), ((4, 8), IDS))
    pairs = pair_products(program, name_roles(program), 2)
    assert "router" not in modules_of(program, set(pairs.factors))
    assert "mlp" in modules_of(program, pairs.rows)


def test_data_parallel(llama: Program) -> None:
    """DDP: parameters whole, every reduction an all-reduce; ZeRO-3: parameters rest split, are gathered, come back."""
    plan = planned(llama, "DDP")
    assert set(plan.parameters.values()) == {"R,R"}
    assert {role for roles in plan.roles.values() for role in roles} & {"column", "row", "sequence"} == set()
    split = planned(llama, "ZeRO-3")
    assert all("R" not in layout for name, layout in split.parameters.items() if name not in ("cos", "sin"))
    kinds = {row.kind for row in split.collectives}
    assert "all_gather" in kinds


def test_megatron(llama: Program) -> None:
    """Columns and rows on the last axis, whole activations between; with sequence, pieces of it between."""
    plain, cut = planned(llama, "Megatron"), planned(llama, "Megatron + sequence")
    forward = [name for name, phase in plain.phases.items() if phase == "forward"]
    roles = {plain.modules[name]: plain.roles[name] for name in forward if "contract" in name}
    assert roles["layers.0.mlp.up_proj"] == ("batch", "column")
    assert roles["layers.0.mlp.down_proj"] == ("batch", "row")
    assert not any("sequence" in plain.roles[name] for name in forward)
    assert any(cut.roles[name] == ("batch", "sequence") for name in forward)
    assert plain.parameters["layers.0.mlp.up_proj.weight"].startswith("R,")
    both = planned(llama, "FSDP x Megatron")
    assert both.parameters["layers.0.mlp.up_proj.weight"].count("S") == 2


def test_what_can_not_be_expressed() -> None:
    """A batch that does not divide, a mesh with one axis, a model without pairs: each says why."""
    single = captured(torch.nn.Linear(4, 6), ((3, 4), torch.float32))
    why = {}
    for title, mesh in (("DDP", MESH), ("FSDP x Megatron", Mesh((2,))), ("Megatron", Mesh((2,)))):
        with pytest.raises(Inexpressible) as refused:
            planned(single, title, mesh)
        why[title] = str(refused.value)
    assert why == {
        "DDP": "a batch of 3 on 4 ranks",
        "FSDP x Megatron": "needs two axes",
        "Megatron": "no pair of products that 2 ranks can split",
    }
