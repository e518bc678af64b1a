"""Traffic of fused kernels: who reads, who writes, who launches."""

import torch
from torch import nn

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.fusion import ALONE, fuses, mark_traffic
from autopar.passes.enumerate_strategies import StrategyTable
from autopar.passes.fold import fold
from autopar.passes.solve.layout_graph import Prices


class Block(nn.Module):
    """A product, a chain of pointwise ops, and another product."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        """Return ``x`` after the two products."""
        h = self.up(x)
        return x + self.down(torch.tanh(h) * torch.sigmoid(h) + 1)


def marked(model, x):
    """Return the program with traffic on its ops."""
    program = annotate(capture(model, (x,), {}))
    return mark_traffic(program, fold(program).class_of)


def chain(program):
    """Return the forward ops between the products."""
    inner = [torch.ops.aten.tanh.default, torch.ops.aten.sigmoid.default, torch.ops.aten.mul.Tensor]
    return [n for n in program.ops() if n.meta["phase"] == "forward" and n.target in inner]


def test_a_chain_is_one_kernel():
    """The product's result is read once, what lies between stays inside, and one op launches."""
    program = marked(Block(), torch.empty(4, 8, 32, device="meta"))
    with torch.no_grad():
        ops = chain(program)
    assert len(ops) == 3
    assert sum(node.meta["traffic"].launches for node in ops) == 1
    tanh, sigmoid, mul = ops
    assert tanh.meta["traffic"].kept_operands == ()
    assert sigmoid.meta["traffic"].kept_operands == (0,)
    assert mul.meta["traffic"].kept_operands == (0, 1)
    assert mul.meta["traffic"].kept_results == (0,)


def test_what_the_backward_reads_is_written():
    """A result that leaves its kernel passes through memory."""
    program = marked(Block(), torch.empty(4, 8, 32, device="meta"))
    for node in chain(program):
        outside = any(user.meta.get("phase") == "backward" for user in node.users)
        assert (0 not in node.meta["traffic"].kept_results) or not outside


def test_products_are_alone():
    """A product reads and writes memory, and launches."""
    program = marked(Block(), torch.empty(4, 8, 32, device="meta"))
    for node in program.ops():
        if node.target is torch.ops.autopar.contract.default:
            assert node.meta["traffic"] == ALONE
    assert not fuses(torch.ops.autopar.contract.default)
    assert fuses(torch.ops.aten.add.Tensor)


def test_fused_programs_cost_less():
    """The same ops cost less with their traffic than each alone, and never less than nothing."""
    program = marked(Block(), torch.empty(64, 512, 32, device="meta"))
    table = StrategyTable(Prices.of(Mesh((1,), device="h100")))
    fused = [float(table.strategies(node).seconds[0]) for node in program.ops()]
    for node in program.ops():
        del node.meta["traffic"]
    alone = [float(table.strategies(node).seconds[0]) for node in program.ops()]
    assert all(0 <= a <= b for a, b in zip(fused, alone))
    assert sum(fused) < 0.9 * sum(alone)


def test_equal_ops_have_equal_traffic():
    """Ops that decide together have one traffic, at the first and last block too."""
    program = capture(nn.Sequential(*[Block() for _ in range(4)]), (torch.empty(4, 8, 32, device="meta"),), {})
    classes = fold(annotate(program)).class_of
    mark_traffic(program, classes)
    seen = {}
    for node in program.ops():
        assert seen.setdefault(classes[node.name], node.meta["traffic"]) == node.meta["traffic"]


def test_a_gather_reads_what_it_returns():
    """The table of an embedding is not read as a whole."""
    program = marked(nn.Embedding(1000, 16), torch.empty(4, dtype=torch.int64, device="meta"))
    lookup = next(node for node in program.ops() if node.target is torch.ops.aten.embedding.default)
    assert lookup.meta["traffic"].share("operands", 0) == 0
    assert lookup.meta["traffic"].share("results", 0) == 1
