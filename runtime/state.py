"""The state of a parallel module: the original's tree of names, with DTensor parameters and replicated buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, OptionError
from autopar.passes.torch_private import new_dtensor
from autopar.placement import REPLICATE, Layout, from_dtensor, local_offset, local_shape, to_dtensor
from autopar.runtime.carry_hooks import carry_hooks
from autopar.runtime.groups import MeshGroups
from autopar.runtime.signature import CONSTANTS


class Mirror(nn.Module):
    """A module that stands for an original, whose attributes in Python can't be set any more: programs were traced."""

    _traced: Mapping[str, Any] = {}

    def watch(self, original: nn.Module) -> None:
        """Take note of the attributes of ``original`` that are neither parameters, buffers nor modules."""
        known = {*nn.Module().__dict__, *self.__dict__}
        values = {key: value for key, value in original.__dict__.items() if key not in known}
        # Only plain values are kept: others may hold the original's tensors.
        self.__dict__["_traced"] = {k: v if isinstance(v, CONSTANTS) else object() for k, v in values.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse one that the original's forward may read, unless it stays what it is."""
        if name in self._traced and repr(value) != repr(self._traced[name]):
            raise InputError(
                f"{name} is an attribute of the original: programs are traced with the value that it had in "
                "parallelize, and would not see another. Set it before, make it a buffer (register_buffer), or pass it "
                "as an argument of the call"
            )
        if name in self._modules and value is not self._modules[name]:
            raise InputError(
                f"{name} is a part of the original: programs were made of it, and would not see another. Replace it in "
                "the original, and call parallelize again"
            )
        super().__setattr__(name, value)


class Branch(Mirror):
    """A module of the mirrored tree: it carries names, and computes nothing."""

    def __init__(self, original: str) -> None:
        super().__init__()
        self._original = original

    def _get_name(self) -> str:
        return self._original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the program runs as a whole."""
        raise OptionError(
            f"a part of a parallel module ({self._original}) can't be called alone: its program is one graph; "
            "call the whole module, or keep the original for partial calls"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise OptionError(
            f"a part of a parallel module ({self._original}) is not called, so that a hook on it would never run; "
            "register it on the original before parallelize, or on the whole module"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook


class Rows(Branch):
    """The branch of a list: its parts have places too."""

    def __len__(self) -> int:
        return len(self._parameters) + len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._parameters.values(), *self._modules.values()])

    def __getitem__(self, place: int | slice) -> Any:
        return list(self)[place]


class Table(Branch):
    """The branch of a dict: its parts are found by their keys too."""

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def __getitem__(self, key: str) -> Any:
        return dict(self.items())[key]

    def keys(self) -> list[str]:
        """Return the keys."""
        return [*self._parameters, *self._modules]

    def values(self) -> list[Any]:
        """Return the parts."""
        return [*self._parameters.values(), *self._modules.values()]

    def items(self) -> list[tuple[str, Any]]:
        """Return key and part of each."""
        return list(zip(self.keys(), self.values()))


def _branch(module: nn.Module) -> Branch:
    name = type(module).__name__
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ParameterList)):
        return Rows(name)
    return Table(name) if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) else Branch(name)


def describe_state(model: nn.Module) -> list[str]:
    """Return one line a parameter and buffer: name, shape, dtype, gradient; tied parameters name their first."""
    first: dict[int, str] = {}
    lines = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tie = first.setdefault(id(parameter), name)
        lines.append(
            f"parameter {name}: {list(parameter.shape)} {parameter.dtype}"
            f"{'' if parameter.requires_grad else ' frozen'}{'' if tie == name else f' tied to {tie}'}"
        )
    lines += [f"buffer {name}: {list(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    return lines


def require_values(model: nn.Module) -> None:
    """Check that the first rank's model has values.

    Raises:
        OptionError: a parameter or buffer is on the meta device.
    """
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_meta:
                raise OptionError(
                    f"the {kind} {name} is on the meta device, and the first rank's values are the ones that are used: "
                    "call model.to_empty(device=...) there and initialise or load the weights before parallelize"
                )


def mirror(
    model: nn.Module,
    root: Mirror,
    groups: MeshGroups,
    layouts: Mapping[str, Layout],
    *,
    stage: MeshGroups | None = None,
    elsewhere: Collection[str] = (),
) -> None:
    """Give ``root`` the tree, parameters and buffers of ``model``, values from the first rank. Collective.

    Args:
        model: the original; only the first rank's values count.
        root: an empty module.
        groups: the processes.
        layouts: where a parameter rests, by its first full name; the others are replicated.
        stage: the ranks that share a parameter, where they are not all.
        elsewhere: first full names of parameters that other stages keep; None stands in their place.
    """
    copies: dict[int, Mirror] = {id(model): root}
    parameters: dict[int, nn.Parameter | None] = {}
    buffers: dict[int, Tensor] = {}
    whole = (REPLICATE,) * (stage or groups).mesh.num_axes
    for name, parameter in model.named_parameters():
        full = share_tensor(parameter.detach(), groups)
        parameters[id(parameter)] = None
        if name not in elsewhere:
            layout = layouts.get(name, whole)
            made = make_parameter(full, layout, stage or groups, parameter.requires_grad)
            carry_hooks(parameter, made)
            parameters[id(parameter)] = made
    for _, buffer in model.named_buffers():
        buffers[id(buffer)] = share_tensor(buffer.detach(), groups)
    for module in model.modules():
        copies.setdefault(id(module), _branch(module))
    for module in model.modules():
        copy = copies[id(module)]
        copy.training = module.training
        copy.watch(module)
        # Names are entered below the checks of add_module: the root has attributes of its own.
        for name, tensor in module._parameters.items():
            copy._parameters[name] = None if tensor is None else parameters[id(tensor)]
        for name, value in module._buffers.items():
            copy._buffers[name] = None if value is None else buffers[id(value)]
        copy._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[id(child)]


def share_tensor(tensor: Tensor, groups: MeshGroups) -> Tensor:
    """Return the first rank's ``tensor`` on every rank, contiguous and on the mesh's device. Collective."""
    if tensor.is_meta:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=groups.device)
    else:
        full = tensor.to(groups.device, copy=True, memory_format=torch.contiguous_format)
    data = full.reshape(-1).view(torch.uint8)
    for axis, size in enumerate(groups.mesh.sizes):
        if size > 1 and data.numel():
            group = groups.device_mesh.get_group(axis)
            dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
    return full


def piece_of(full: Tensor, layout: Layout, groups: MeshGroups) -> Tensor:
    """Return this rank's piece of a full tensor, with storage of its own unless it is all of it."""
    if all(code == REPLICATE for code in layout):
        return full
    shape = local_shape(full.shape, layout, groups.mesh.sizes, groups.coordinate)
    offset = local_offset(full.shape, layout, groups.mesh.sizes, groups.coordinate)
    piece = full
    for dim, (start, length) in enumerate(zip(offset, shape)):
        piece = piece.narrow(dim, start, length)
    return piece.clone(memory_format=torch.contiguous_format)


def as_dtensor(local: Tensor, layout: Layout, shape: torch.Size | tuple[int, ...], groups: MeshGroups) -> DTensor:
    """Return a DTensor of a global ``shape`` whose piece here is ``local``. No communication."""
    stride, count = [], 1
    for size in reversed(shape):
        stride.append(count)
        count *= max(int(size), 1)
    return DTensor.from_local(
        local,
        groups.device_mesh,
        to_dtensor(layout),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(reversed(stride)),
    )


def as_dtensor_like(local: Tensor, pattern: DTensor) -> DTensor:
    """Return a DTensor that lies like ``pattern``; ``from_local`` costs twenty times as much."""
    return new_dtensor(local, pattern._spec)


def make_parameter(full: Tensor, layout: Layout, groups: MeshGroups, requires_grad: bool) -> nn.Parameter:
    """Return a DTensor parameter of a full tensor that every rank has."""
    tensor = as_dtensor(piece_of(full, layout, groups), layout, full.shape, groups)
    return nn.Parameter(tensor, requires_grad=requires_grad)


def lay_out(parameter: nn.Parameter, layout: Layout, groups: MeshGroups) -> None:
    """Change in place where a replicated parameter rests, so that an optimizer that holds it keeps holding it."""
    local = local_of(parameter)
    target = as_dtensor(piece_of(local, layout, groups), layout, parameter.shape, groups)
    parameter._local_tensor = target._local_tensor  # type: ignore[attr-defined]
    parameter._spec = target._spec  # type: ignore[attr-defined]


def local_of(tensor: Tensor) -> Tensor:
    """Return the piece of a DTensor, outside autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def place_like(value: Tensor, parameter: Tensor, groups: MeshGroups) -> Tensor:
    """Return a full tensor, or a DTensor of any layout, as a DTensor that lies like ``parameter``."""
    assert isinstance(parameter, DTensor)
    if isinstance(value, DTensor):
        if value.device_mesh == parameter.device_mesh:
            return value.redistribute(placements=parameter.placements)
        value = value.full_tensor()
    layout = from_dtensor(parameter.placements)
    return as_dtensor(piece_of(value.detach().to(groups.device), layout, groups), layout, parameter.shape, groups)


def adapt_state(root: nn.Module, state: dict[str, Any], prefix: str, groups: MeshGroups) -> None:
    """Replace the tensors of a state dict by such as ``load_state_dict`` can copy into the tensors of ``root``.

    Shapes that do not fit are left as they are, for ``load_state_dict`` to report.
    """
    for name, parameter in root.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            state[prefix + name] = place_like(value, parameter, groups)
    for name, _ in root.named_buffers(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, DTensor):
            state[prefix + name] = value.full_tensor()


def full_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with full plain tensors in place of DTensors, tied ones still the same tensor. Collective."""
    done: dict[int, Tensor] = {}
    out: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            key = id(local_of(value))
            if key not in done:
                full = value.full_tensor() if isinstance(value, DTensor) else value
                done[key] = full.detach().clone()
            value = done[key]
        out[name] = value
    return out
