"""Which collectives run as one."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.collective_calls import collective_calls
from autopar.passes.improve.bucket_collectives import bucket_collectives
from autopar.passes.improve.edits import Coalesce, apply_edits
from autopar.passes.improve.setting import Setting
from autopar.passes.improve.transfers import transfers
from autopar.passes.program import Input, Output
from autopar.passes.split_phases import GraphOnly
from tests.passes.improve.small_graph import SmallGraph

C10D = torch.ops._c10d_functional


def gradients(elements: list[int], dtypes: list[torch.dtype] | None = None) -> fx.GraphModule:
    """Return a graph that makes tensors one after the other and sums each over axis 0 as soon as it is there."""
    graph = fx.Graph()
    seed = graph.placeholder("seed")
    seed.meta.update(val=torch.empty(1, device="meta"), phase="forward")
    ends = []
    for index, count in enumerate(elements):
        dtype = dtypes[index] if dtypes else torch.float32
        made = graph.call_function(torch.ops.aten.zeros.default, ([count],), {"dtype": dtype})
        arc = {"arc": "all_reduce", "origin": f"g{index}", "reason": "summed"}
        call = graph.call_function(C10D.all_reduce.default, (made, "sum", "axis:0"))
        wait = graph.call_function(C10D.wait_tensor.default, (call,))
        for node in (made, call, wait):
            node.meta.update(val=torch.empty(count, dtype=dtype, device="meta"), phase="forward", module="", source="")
        call.meta.update(arc)
        wait.meta.update(arc, layout=(-1,))
        ends.append(wait)
    graph.output(tuple(ends))
    return GraphOnly(torch.nn.Module(), graph)


def buckets(joint: fx.GraphModule, mesh: Mesh) -> list[int]:
    """Return how many collectives each bucket has."""
    edits = bucket_collectives(joint, Setting(mesh, (), ()))
    return [len(edit.calls) for edit in edits if isinstance(edit, Coalesce)]


def mesh_of(link: str) -> Mesh:
    """Return two devices on a link."""
    return Mesh((2,), device="h100", links=(link,))


def test_small_ones_become_one() -> None:
    """Sixteen sums of 4 kB are one; what runs as one is taken apart in order."""
    joint = gradients([1000] * 16)
    assert buckets(joint, mesh_of("infiniband_ndr")) == [16]
    apply_edits([joint.graph], bucket_collectives(joint, Setting(mesh_of("infiniband_ndr"), (), ())))
    joint.graph.lint()
    (call,) = [node for node in joint.graph.nodes if collective_calls(node)]
    assert [each.origin for each in collective_calls(call)] == [f"g{i}" for i in range(16)]


def test_large_ones_stay_apart() -> None:
    """A gigabyte takes far longer than a collective takes to start: it is not kept waiting for another."""
    assert buckets(gradients([250_000_000] * 4), mesh_of("infiniband_ndr")) == []


def test_a_bucket_ends_where_bytes_take_as_long_as_the_start() -> None:
    """In between there are several, larger where the link is faster."""
    joint = gradients([100_000] * 64)
    slow, fast = buckets(joint, mesh_of("infiniband_ndr")), buckets(joint, mesh_of("nvlink4"))
    assert 1 < max(slow) < max(fast)


def test_dtypes_stay_apart() -> None:
    """One buffer has one dtype."""
    joint = gradients([1000] * 4, [torch.float32, torch.bfloat16] * 2)
    assert buckets(joint, mesh_of("infiniband_ndr")) == [2, 2]


def test_a_bucket_ends_at_the_first_use() -> None:
    """What needs the first sum before the last is made keeps them apart."""
    joint = gradients([1000] * 2)
    nodes = {node.name: node for node in joint.graph.nodes}
    wait, made = nodes["wait_tensor_default"], nodes["zeros_default_1"]
    with joint.graph.inserting_before(made):
        used = joint.graph.call_function(torch.ops.aten.neg.default, (wait,))
    used.meta.update(wait.meta)
    used.meta.pop("arc")
    made.args = ([1000],)
    assert buckets(joint, mesh_of("infiniband_ndr")) == []


@pytest.mark.parametrize("budget", [None, 9000])
def test_a_bucket_keeps_the_budget(budget: int | None) -> None:
    """Operands that wait for the last one take memory, which may not be there: then buckets are smaller."""
    joint = gradients([1000] * 16)
    roles = [Input("seed", "input", "args[0]")], [Output("output", f"[{i}]", f"g{i}", i) for i in range(16)]
    setting = Setting(mesh_of("infiniband_ndr"), *map(tuple, roles), memory_bytes=budget)  # type: ignore[arg-type]
    (found,) = [len(edit.calls) for edit in bucket_collectives(joint, setting) if isinstance(edit, Coalesce)][:1]
    assert (found == 16) == (budget is None)


def test_two_steps_of_a_route_do_not_lock_each_other() -> None:
    """What follows another collective is not brought before it, where that one waits for others of its bucket."""
    g = SmallGraph((1000,))
    x = g.input("x")
    early, late = (g.op(torch.ops.aten.neg.default, x, name=name) for name in ("early", "late"))
    first = g.all_reduce(early, "first", axis=0)
    second = g.all_reduce(first, "second", axis=1)
    other = g.op(torch.ops.aten.exp.default, late)
    third = g.all_reduce(other, "third", axis=0)
    fourth = g.all_reduce(third, "fourth", axis=1)
    joint = g.joint(second, fourth)
    mesh = Mesh((2, 2), device="h100", links=("infiniband_ndr", "nvlink4"))
    assert [each.follows for each in transfers(joint.graph)] == [False, True, False, True]
    apply_edits([joint.graph], bucket_collectives(joint, Setting(mesh, (), ())))
    joint.graph.lint()
    assert [node.name for node in joint.graph.nodes if collective_calls(node)] == ["first", "third", "second_and_1"]
