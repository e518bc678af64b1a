"""The mirrored state, on a world of one process, and the pieces of every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, OptionError
from autopar.mesh import Mesh
from autopar.runtime.groups import MeshGroups
from autopar.runtime.state import Mirror, describe_state, lay_out, local_of, mirror, piece_of, require_values
from tests.runtime.test_shadow import Tied


def test_mirror(groups: MeshGroups) -> None:
    """The mirror has the original's names, order, ties, flags and values, all parameters as DTensors."""
    model, root = Tied(), Mirror()
    model.eval()
    mirror(model, root, groups, {})
    assert list(root.state_dict()) == list(model.state_dict())
    assert [name for name, _ in root.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert root.head.weight is root.table.weight
    assert not root.frozen.weight.requires_grad
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    assert torch.equal(cast(Any, root).table.weight.full_tensor(), model.table.weight)
    assert local_of(root.table.weight).data_ptr() != model.table.weight.data_ptr()
    assert not root.head.training
    assert describe_state(root) == describe_state(model)


def test_part_refuses_to_run(groups: MeshGroups) -> None:
    """A part of the mirror says why it can't be called."""
    root = Mirror()
    mirror(Tied(), root, groups, {})
    with pytest.raises(OptionError, match=r"\(Linear\) can't be called alone"):
        root.head(torch.zeros(1))
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        with pytest.raises(OptionError, match=r"\(Linear\) is not called, so that a hook on it would never run"):
            getattr(root.head, f"register_{kind}_hook")(print)
    with pytest.raises(InputError, match="head is a part of the original"):
        root.head = nn.Linear(2, 2)
    root.head = root.head


def test_parts_of_lists_and_dicts(groups: MeshGroups) -> None:
    """They are found by place and by key, as in the original: for groups of an optimizer, say."""
    model: Any = nn.Module()
    model.rows = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    model.layers, model.empty = nn.ModuleList([nn.Linear(1, 1)]), nn.ModuleList()
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))])
    model.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(3, 3)})
    model.shifts = nn.ParameterDict({"b": nn.Parameter(torch.ones(4))})
    root: Any = Mirror()
    mirror(model, root, groups, {})
    assert root.rows[-1] is root.rows.get_submodule("2") and len(root.rows) == 3 and len(root.rows[1:]) == 2
    assert [part.weight.shape for part in root.layers] == [(1, 1)] and not root.empty
    assert [tuple(scale.shape) for scale in root.scales] == [(2,), (3,)] and root.scales[1].requires_grad
    assert list(root.heads) == ["a", "b"] and root.heads["b"].weight.shape == (3, 3) and "c" not in root.heads
    assert [(key, tuple(value.shape)) for key, value in root.shifts.items()] == [("b", (4,))]
    assert list(root.state_dict()) == list(model.state_dict())


def test_attributes_that_were_traced(groups: MeshGroups) -> None:
    """Setting what the original's forward may read in Python would change nothing: it is refused."""
    model, root = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 3)), Mirror()
    model.scale, model.steps = 2.0, [1, 2]  # type: ignore[assignment]
    mirror(model, root, groups, {})
    part = root.get_submodule("0")
    told = "is an attribute of the original: programs are traced with the value"
    for module, name, value in ((part, "p", 0.5), (root, "scale", 3.0), (root, "steps", [1, 2]), (root, "scale", None)):
        with pytest.raises(InputError, match=f"{name} {told}"):
            setattr(module, name, value)
    part.p, root.scale, root.note = 0.1, 2.0, "mine"  # type: ignore[assignment]
    root.train(False)
    assert not part.training


def test_lay_out_keeps_the_object(groups: MeshGroups) -> None:
    """Changing where a parameter rests keeps the object and its value."""
    root = Mirror()
    mirror(Tied(), root, groups, {})
    weight = root.head.weight
    before = weight.full_tensor().clone()
    lay_out(weight, (0, 1), groups)
    assert root.table.weight is weight
    assert str(weight.placements) == "(Shard(dim=0), Shard(dim=1))"
    assert torch.equal(weight.full_tensor(), before)


def test_pieces() -> None:
    """Pieces follow the chunk convention, the earlier axis outside."""
    full = torch.arange(7)
    mesh = Mesh((2, 2))
    pieces = []
    for coordinate in mesh.coordinates():
        groups = cast(MeshGroups, SimpleNamespace(mesh=mesh, coordinate=coordinate))
        pieces.append(piece_of(full, (0, 0), groups).tolist())
        assert piece_of(full, (-1, -1), groups) is full
    assert pieces == [[0, 1], [2, 3], [4, 5], [6]]


def test_meta_refused() -> None:
    """A first rank without values is told what to do."""
    with pytest.raises(OptionError, match=r"weight is on the meta device.*to_empty"):
        require_values(nn.Linear(2, 2, device="meta"))
