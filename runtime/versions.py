"""Whether parameters are still what they were in the forward whose backward reads them as they rest.

A change in place of a DTensor counts on the DTensor, not on its local piece, so autograd can't see it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.passes.improve.memories import Memories
from autopar.passes.improve.setting import Setting
from autopar.passes.local_program import LocalProgram
from autopar.runtime.state import local_of

Version = tuple[str, Tensor, int]
"""Name, parameter and version."""


class Versions:
    """The parameters that the backward of one program reads as they rest.

    Args:
        local: the lowered program.
        names: of the arguments of its forward.
    """

    def __init__(self, local: LocalProgram, names: Sequence[str]) -> None:
        self._local, self._names = local, names

    def of(self, tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Version]:
        """Return them as they are now, for a forward's arguments and what it saved."""
        out: list[Version] = []
        for index, positions in self._perhaps_saved:
            tensor = tensors[index]
            if isinstance(tensor, DTensor):
                memory = local_of(tensor).untyped_storage().data_ptr()
                if any(saved[position].untyped_storage().data_ptr() == memory for position in positions):
                    out.append((self._names[index], tensor, tensor._version))
        return out

    @cached_property
    def _perhaps_saved(self) -> list[tuple[int, tuple[int, ...]]]:
        """The arguments of the forward, and where among what it saves their memory may be."""
        forward = self._local.forward
        memories = Memories(forward.graph, Setting(self._local.mesh, (), ()))
        (ends,) = forward.graph.output_node().args
        saved = ends[len(ends) - self._local.num_saved :]  # type: ignore[arg-type,index]
        found = []
        for index, node in enumerate(n for n in forward.graph.nodes if n.op == "placeholder"):
            positions = tuple(i for i, end in enumerate(saved) if memories.same(node, end))  # type: ignore[arg-type]
            if positions:
                found.append((index, positions))
        return found


def require_unchanged(versions: Sequence[Version]) -> None:
    """Check that nothing changed parameters since the forward whose backward needs them.

    Raises:
        InputError: a parameter was changed in place.
    """
    for name, tensor, version in versions:
        if tensor._version != version:
            raise InputError(
                f"the parameter {name} was changed in place between the forward and its backward, which needs the old "
                "values: call backward before the optimizer's step or before loading a state"
            )
