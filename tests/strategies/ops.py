"""Arguments for every op in the table of rules: one generator an op, drawing shapes, dtypes and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.passes.rules import elementwise, families

families.load()

aten = torch.ops.aten
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

FLOATS = (torch.float64, torch.float32, torch.bfloat16)
WIDE = (torch.float64, torch.float32)


class Draw:
    """Draws for one op: sizes and options by hypothesis, numbers by torch from a drawn seed."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
        self.dtype = torch.float32

    def int(self, low: int, high: int) -> int:
        """Draw an int of ``[low, high]``."""
        return int(self.draw(st.integers(low, high)))

    def bool(self) -> bool:
        """Draw a truth value."""
        return bool(self.draw(st.booleans()))

    def of(self, values: Sequence[Any]) -> Any:
        """Draw one of ``values``."""
        return self.draw(st.sampled_from(list(values)))

    def size(self) -> int:
        """Draw the size of a dim: sometimes 1, often one that no axis divides."""
        return int(self.draw(st.sampled_from([6, 1, 2, 3, 4, 5, 7, 8, 12])))

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        """Draw a shape of ``[low, high]`` dims."""
        return tuple(self.size() for _ in range(self.int(low, high)))

    def float(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random floating point numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """Return random indices below ``high``."""
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        """Return random truth values."""
        return torch.rand(shape, generator=self.generator) > 0.5

    def dim(self, rank: int) -> int:
        """Draw a dim of a tensor, counted from either end."""
        return self.int(-rank, rank - 1) if rank else self.int(-1, 0)


Generator = Callable[[Draw], Arguments]
GENERATORS: dict[Any, Generator] = {}


def generates(*targets: Any, dtypes: Sequence[torch.dtype] = FLOATS) -> Callable[[Generator], Generator]:
    """Enter a generator for ``targets``; it draws ``Draw.dtype`` of ``dtypes`` first."""

    def enter(function: Generator) -> Generator:
        def with_dtype(draw: Draw) -> Arguments:
            draw.dtype = draw.of(dtypes)
            return function(draw)

        for target in targets:
            GENERATORS[target] = with_dtype
        return function

    return enter


def enter_contractions() -> None:
    """Enter the generators of the contract family."""

    @generates(torch.ops.autopar.contract.default, dtypes=FLOATS)
    def contract(d: Draw) -> Arguments:
        letters = {"a": d.size(), "b": d.size(), "c": d.size(), "k": d.size(), "n": d.size()}
        equation = d.of(
            [
                "abk,nk->abn",
                "abk,kn->abn",
                "abn,abk->nk",
                "bk,nk->bn",
                "abcn,abnk->abck",
                "k,nk->n",
                "ab,ab->",
                "ab,cn->abcn",
            ]
        )
        return (*[d.float(*(letters[x] for x in text)) for text in equation.split("->")[0].split(",")], equation), {}

    @generates(aten.mm.default)
    def mm(d: Draw) -> Arguments:
        m, k, n = d.size(), d.size(), d.size()
        return (d.float(m, k), d.float(k, n)), {}

    @generates(aten.bmm.default)
    def bmm(d: Draw) -> Arguments:
        b, m, k, n = d.size(), d.size(), d.size(), d.size()
        return (d.float(b, m, k), d.float(b, k, n)), {}

    @generates(aten.dot.default)
    def dot(d: Draw) -> Arguments:
        k = d.size()
        return (d.float(k), d.float(k)), {}

    @generates(aten.mv.default)
    def mv(d: Draw) -> Arguments:
        m, k = d.size(), d.size()
        return (d.float(m, k), d.float(k)), {}

    @generates(aten.einsum.default, dtypes=WIDE)
    def einsum(d: Draw) -> Arguments:
        letters = {"a": d.size(), "b": d.size(), "k": d.size(), "n": d.size()}
        equation = d.of(
            ["abk,nk->abn", "abk,ank->abn", "ak,kn->na", "ab->ba", "ab->a", "ab,kb->", "aab->b", "...b,b->...b"]
        )
        texts = equation.split("->")[0].replace("...", "a").split(",")
        return (equation, [d.float(*(letters[x] for x in text)) for text in texts]), {}

    @generates(aten.matmul.default, dtypes=WIDE)
    def matmul(d: Draw) -> Arguments:
        lead, m, k, n = d.shape(0, 2), d.size(), d.size(), d.size()
        other = d.of([lead, (), tuple(1 for _ in lead), lead[1:]])
        return (d.float(*lead, m, k), d.float(*other, k, n)), {}

    @generates(aten.addmm.default, dtypes=WIDE)
    def addmm(d: Draw) -> Arguments:
        m, k, n = d.size(), d.size(), d.size()
        bias = d.float(*d.of([(n,), (m, n), (1, n), (m, 1)]))
        return (bias, d.float(m, k), d.float(k, n)), d.of([{}, {"beta": 0.5, "alpha": 2.0}])

    @generates(aten.addmv.default, dtypes=WIDE)
    def addmv(d: Draw) -> Arguments:
        m, k = d.size(), d.size()
        return (d.float(m), d.float(m, k), d.float(k)), {}

    @generates(aten.baddbmm.default, aten.addbmm.default, dtypes=WIDE)
    def baddbmm(d: Draw) -> Arguments:
        b, m, k, n = d.size(), d.size(), d.size(), d.size()
        return (d.float(m, n), d.float(b, m, k), d.float(b, k, n)), {}

    @generates(aten.linear.default, dtypes=WIDE)
    def linear(d: Draw) -> Arguments:
        lead, k, n = d.shape(1, 3), d.size(), d.size()
        bias = d.of([None, d.float(n)])
        return (d.float(*lead, k), d.float(n, k), bias), {}


enter_contractions()

INTEGER = frozenset(
    [
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_not",
        "bitwise_left_shift",
        "bitwise_right_shift",
        "gcd",
        "lcm",
        "__and__",
        "__or__",
        "__xor__",
        "__lshift__",
        "__rshift__",
    ]
)
POSITIVE = frozenset(
    [
        "igamma",
        "igammac",
        "polygamma",
        "digamma",
        "lgamma",
        "special_ndtri",
        "special_entr",
        "logit",
        "erfinv",
        "acosh",
        "pow",
    ]
)
KNOWN_SCALARS: dict[str, Any] = {
    "n": 1,
    "approximate": "none",
    "eps": 0.25,
    "decimals": 1,
    "is_result": False,
    "min": -0.5,
}


def _elementwise(target: Any) -> Generator:
    """Return a generator that reads an elementwise op's schema: tensors that broadcast, scalars of a fitting type."""
    name = target._schema.name.split("::")[1]

    def generate(d: Draw) -> Arguments:
        full = d.shape(0, 4)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        backward = name.endswith("_backward")
        for argument in target._schema.arguments:
            value = _argument(d, name, argument, full, first=not args, exact=backward)
            if value is _SKIP:
                continue
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    return generate


_SKIP = object()


def _argument(d: Draw, name: str, argument: Any, full: tuple[int, ...], *, first: bool, exact: bool) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        shape = full if first or exact else _broadcast(d, full)
        if name in ("masked_fill", "fill") and argument.name == "value":
            shape = ()
        return _operand(d, name, argument.name, shape)
    if argument.name in KNOWN_SCALARS and kind != "Optional[number]":
        return KNOWN_SCALARS[argument.name]
    if argument.name == "rounding_mode":
        return d.of([None, "floor", "trunc"])
    if argument.name == "dtype" and not kind.startswith("Optional"):
        return d.of([torch.float64, torch.bfloat16, torch.float32])
    if argument.name == "dtype" and name == "_to_copy":
        return d.of([torch.float64, torch.bfloat16, torch.float32])
    if kind in ("number", "Optional[number]", "float") and not (
        argument.has_default_value() and argument.kwarg_only and name != "add"
    ):
        if name in INTEGER:
            return d.of([1, 2, 3])
        return d.of([1, 0]) if name in ("where", "masked_fill", "add") and argument.name != "alpha" else d.of([2, 0.5])
    if kind == "bool" and not argument.has_default_value():
        return d.bool()
    if kind == "int" and not argument.has_default_value():
        return 1
    return _SKIP if argument.kwarg_only else argument.default_value


def _broadcast(d: Draw, full: tuple[int, ...]) -> tuple[int, ...]:
    """Draw a shape that broadcasts to ``full``."""
    kept = tuple(1 if d.int(0, 3) == 0 else size for size in full)
    return kept[d.of([0, 0, 0, min(1, len(full))]) :]


def _operand(d: Draw, name: str, argument: str, shape: tuple[int, ...]) -> Tensor:
    if name in INTEGER:
        return torch.randint(1, 5, shape, generator=d.generator)
    if argument in ("condition", "mask"):
        return d.mask(*shape)
    values = d.float(*shape)
    if name in POSITIVE or name.startswith("log") or "sqrt" in name:
        return values.abs().clamp(0.05, 0.9) if name != "acosh" else values.abs() + 1.1
    return values


ONLY_WIDE = frozenset(
    [
        "igamma",
        "igammac",
        "hypot",
        "polygamma",
        "special_ndtri",
        "special_log_ndtr",
        "special_erfcx",
        "special_i0e",
        "special_i1",
        "special_i1e",
        "i0",
        "nextafter",
        "logit",
        "logit_backward",
        "erfinv",
        "special_xlog1py",
        "special_entr",
    ]
)

_SUMS = ["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"]
for _name in [*elementwise.PLAIN, *elementwise.FIRST, *_SUMS, "masked_fill", "addcmul", "addcdiv", "lerp"]:
    for _target in elementwise.overloads(_name):
        generates(_target, dtypes=WIDE if _name in ONLY_WIDE else FLOATS)(_elementwise(_target))
for _target in (aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf):
    generates(_target)(_elementwise(_target))
generates(aten._to_copy.default, torch.ops.prims.convert_element_type.default)(
    lambda d: _elementwise(d.of([aten._to_copy.default]))(d)
)
generates(torch.ops.prims.convert_element_type.default)(
    lambda d: ((d.float(*d.shape()), d.of([torch.float64, torch.bfloat16, torch.float32])), {})
)


def enter_reductions() -> None:
    """Enter the generators of the reductions family."""

    def some_dims(d: Draw, rank: int) -> list[int]:
        return sorted({d.int(0, rank - 1) for _ in range(d.int(1, 2))}) if rank else []

    @generates(aten.sum.default, aten.max.default, aten.min.default, aten.prod.default, dtypes=WIDE)
    def of_all(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.count_nonzero.default, aten.any.default, aten.all.default)
    def of_masks(d: Draw) -> Arguments:
        return (d.mask(*d.shape()),), {}

    @generates(aten.nansum.default, aten.mean.default, dtypes=WIDE)
    def of_floats(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.sum.dim_IntList)
    def sum_dims(d: Draw) -> Arguments:
        x = d.of([d.float, lambda *s: d.index(9, *s), d.mask])(*d.shape())
        options = d.of([{}, {"dtype": torch.float64}])
        return (x, d.of([some_dims(d, x.dim()), [], None]), d.bool()), options

    @generates(aten.mean.dim, aten.logsumexp.default, aten.count_nonzero.dim_IntList, dtypes=WIDE)
    def mean_dims(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, some_dims(d, x.dim())), {}

    @generates(aten.amax.default, aten.amin.default)
    def extremes(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.of([some_dims(d, x.dim()), []]), d.bool()), {}

    @generates(aten.any.dims, aten.all.dims)
    def any_dims(d: Draw) -> Arguments:
        x = d.mask(*d.shape(1))
        return (x, some_dims(d, x.dim()), d.bool()), {}

    @generates(aten.any.dim, aten.all.dim)
    def any_dim(d: Draw) -> Arguments:
        x = d.mask(*d.shape(1))
        return (x, d.dim(x.dim()), d.bool()), {}

    @generates(
        aten.max.dim,
        aten.min.dim,
        aten.median.dim,
        aten.nanmedian.dim,
        aten.mode.default,
        aten.prod.dim_int,
        dtypes=WIDE,
    )
    def one_dim(d: Draw) -> Arguments:
        x = d.float(*d.shape(1, 3))
        return (x, d.dim(x.dim()), d.bool()), {}

    @generates(aten.argmax.default, aten.argmin.default, dtypes=WIDE)
    def arg_extremes(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.of([None, d.dim(x.dim())])), {}

    @generates(aten.kthvalue.default, aten.topk.default, dtypes=WIDE)
    def kth(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, 1, d.dim(x.dim())), {}

    @generates(
        aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, dtypes=WIDE
    )
    def spread(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, some_dims(d, x.dim())), {"correction": 0, "keepdim": d.bool()}

    @generates(aten.linalg_vector_norm.default, dtypes=WIDE)
    def vector_norm(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, 2, d.of([None, some_dims(d, x.dim())]), d.bool()), {}

    @generates(aten.norm.ScalarOpt_dim, dtypes=WIDE)
    def norm(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, 2, some_dims(d, x.dim()), d.bool()), {}

    @generates(
        aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
        aten.sort.default, aten.argsort.default, dtypes=WIDE
    )  # fmt: skip
    def scans(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim())), {}

    @generates(aten.sort.stable, dtypes=WIDE)
    def stable_sort(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x,), {"stable": True, "dim": d.dim(x.dim())}

    @generates(aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default)
    def softmax(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim())), {}

    @generates(aten._softmax.default, aten._log_softmax.default)
    def inner_softmax(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim()), False), {}

    @generates(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, dtypes=WIDE)
    def softmax_backward(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), d.float(*shape).softmax(dim), dim, d.dtype), {}

    @generates(aten.flip.default)
    def flip(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.of([[], some_dims(d, x.dim())])), {}

    @generates(aten.roll.default)
    def roll(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, [1], d.of([[], [d.dim(x.dim())]])), {}


def enter_views() -> None:
    """Enter the generators of the views family."""

    def reshaped(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw two shapes of the same number of elements: dims of the first are merged, split or moved into ones."""
        shape = d.shape(0, 4)
        out: list[int] = []
        for size in shape:
            action = d.int(0, 4)
            if action == 0 and out:
                out[-1] *= size
            elif action == 1 and size % 2 == 0:
                out += d.of([[2, size // 2], [size // 2, 2]])
            elif action == 2:
                out += [1, size]
            else:
                out.append(size)
        other = tuple(out)
        return (shape, other) if d.bool() else (other, shape)

    @generates(
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_copy.default,
        aten.view_copy.default,
    )
    def view(d: Draw) -> Arguments:
        source, target = reshaped(d)
        sizes = list(target)
        if sizes and d.bool():
            sizes[d.int(0, len(sizes) - 1)] = -1
        return (d.float(*source), sizes), {}

    @generates(aten.squeeze.default)
    def squeeze(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.squeeze.dim)
    def squeeze_dim(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim())), {}

    @generates(aten.squeeze.dims)
    def squeeze_dims(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, sorted({d.int(0, x.dim() - 1), d.int(0, x.dim() - 1)})), {}

    @generates(aten.unsqueeze.default)
    def unsqueeze(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.int(-x.dim() - 1, x.dim())), {}

    @generates(aten.flatten.using_ints)
    def flatten(d: Draw) -> Arguments:
        x = d.float(*d.shape(2, 4))
        return (x, d.int(0, 1), -1), {}

    @generates(aten.unflatten.int)
    def unflatten(d: Draw) -> Arguments:
        return (d.float(d.size(), 12, d.size()), 1, d.of([[3, 4], [2, -1], [2, 3, 2]])), {}

    @generates(aten.view.dtype, dtypes=WIDE)
    def view_dtype(d: Draw) -> Arguments:
        return (d.float(*d.shape(1, 3), 4), d.of([torch.float64, torch.int32, torch.float32])), {}

    @generates(aten.expand.default, aten.expand_copy.default, aten.broadcast_to.default)
    def expand(d: Draw) -> Arguments:
        full = d.shape(0, 4)
        x = d.float(*_broadcast(d, full))
        lead = len(full) - x.dim()
        sizes = [-1 if i >= lead and x.shape[i - lead] == n and d.bool() else n for i, n in enumerate(full)]
        return (x, list(full) if d.bool() else sizes), {}

    @generates(aten.expand_as.default)
    def expand_as(d: Draw) -> Arguments:
        full = d.shape(0, 3)
        return (d.float(*_broadcast(d, full)), d.float(*full)), {}

    @generates(aten.permute.default, aten.permute_copy.default)
    def permute(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        order = list(d.draw(st.permutations(range(x.dim())))) if not hasattr(d, "r") else list(range(x.dim()))[::-1]
        return (x, order), {}

    @generates(aten.transpose.int, aten.movedim.int)
    def transpose(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim()), d.dim(x.dim())), {}

    @generates(aten.t.default, aten.numpy_T.default)
    def t(d: Draw) -> Arguments:
        return (d.float(*d.shape(0, 2)),), {}

    @generates(aten.repeat.default)
    def repeat(d: Draw) -> Arguments:
        x = d.float(*d.shape(0, 3))
        return (x, [d.int(1, 2) for _ in range(x.dim() + d.int(0, 1))]), {}

    @generates(aten.repeat_interleave.self_int)
    def repeat_interleave(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.int(1, 3), d.of([None, d.dim(x.dim()), d.dim(x.dim())])), {}


enter_reductions()
enter_views()


def enter_slices() -> None:
    """Enter the generators of the slicing family."""

    def sliced(d: Draw) -> tuple[tuple[int, ...], int, int, int, int]:
        """Draw a shape, a dim of it, and the start, end and step of a slice."""
        shape = d.shape(1)
        dim = d.dim(len(shape))
        size = shape[dim]
        start = d.int(0, size - 1)
        return shape, dim, *d.of([(0, 2**62, 1), (start, d.int(start + 1, size), d.int(1, 2))])

    @generates(aten.slice.Tensor, aten.slice_copy.Tensor)
    def slice_(d: Draw) -> Arguments:
        shape, *rest = sliced(d)
        return (d.float(*shape), *rest), {}

    @generates(aten.narrow.default, aten.narrow_copy.default)
    def narrow(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        start = d.int(0, shape[dim] - 1)
        return (d.float(*shape), dim, start, d.int(1, shape[dim] - start)), {}

    @generates(aten.slice_backward.default)
    def slice_backward(d: Draw) -> Arguments:
        shape, dim, start, end, step = sliced(d)
        grad = torch.ops.aten.slice.Tensor(d.float(*shape), dim, start, end, step)
        return (grad.contiguous(), list(shape), dim, start, end, step), {}

    @generates(aten.slice_scatter.default)
    def slice_scatter(d: Draw) -> Arguments:
        shape, *rest = sliced(d)
        source = torch.ops.aten.slice.Tensor(d.float(*shape), *rest).contiguous()
        return (d.float(*shape), source, *rest), {}

    @generates(aten.select.int, aten.select_copy.int)
    def select(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), dim, d.int(-shape[dim], shape[dim] - 1)), {}

    @generates(aten.select_backward.default)
    def select_backward(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        grad = d.float(*shape).select(dim, 0).contiguous()
        return (grad, list(shape), dim, d.int(0, shape[dim] - 1)), {}

    @generates(aten.select_scatter.default)
    def select_scatter(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), d.float(*shape).select(dim, 0).contiguous(), dim, d.int(0, shape[dim] - 1)), {}

    @generates(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor, aten.chunk.default,
               aten.unsafe_chunk.default, aten.tensor_split.sections)  # fmt: skip
    def split(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), d.int(1, shape[dim]), dim), {}

    @generates(aten.split_with_sizes.default, aten.split_with_sizes_copy.default)
    def split_with_sizes(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        first = d.int(1, shape[dim])
        return (d.float(*shape), [first, shape[dim] - first], dim), {}

    @generates(aten.unbind.int)
    def unbind(d: Draw) -> Arguments:
        shape = d.shape(1)
        return (d.float(*shape), d.dim(len(shape))), {}

    @generates(aten.cat.default)
    def cat(d: Draw) -> Arguments:
        shape = list(d.shape(1))
        dim = d.dim(len(shape))
        tensors = []
        for _ in range(d.int(1, 3)):
            shape[dim] = d.size()
            tensors.append(d.float(*shape))
        return (tensors, dim), {}

    @generates(aten.stack.default)
    def stack(d: Draw) -> Arguments:
        shape = d.shape(0, 3)
        tensors = [d.float(*shape) for _ in range(d.int(1, 3))]
        return (tensors, d.int(-len(shape) - 1, len(shape))), {}

    @generates(aten.constant_pad_nd.default)
    def constant_pad_nd(d: Draw) -> Arguments:
        shape = d.shape(1)
        pad = [d.int(0, 1) for _ in range(2 * d.int(1, len(shape)))]
        return (d.float(*shape), pad, d.of([0, 1.5])), {}

    @generates(aten.unfold.default, aten.unfold_copy.default)
    def unfold(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), dim, d.int(1, shape[dim]), d.int(1, 2)), {}

    @generates(aten.unfold_backward.default, dtypes=WIDE)
    def unfold_backward(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.int(0, len(shape) - 1)
        size, step = d.int(1, shape[dim]), d.int(1, 2)
        grad = d.float(*shape).unfold(dim, size, step).contiguous()
        return (grad, list(shape), dim, size, step), {}

    @generates(aten.tril.default, aten.triu.default)
    def triangle(d: Draw) -> Arguments:
        return (d.float(*d.shape(2)), d.int(-2, 2)), {}


def enter_factories() -> None:
    """Enter the generators of the factories family."""

    @generates(aten.zeros.default, aten.ones.default, aten.empty.memory_format)
    def zeros(d: Draw) -> Arguments:
        return (list(d.shape()),), {"dtype": d.dtype}

    @generates(aten.full.default)
    def full(d: Draw) -> Arguments:
        return (list(d.shape()), 2.5), {"dtype": d.dtype}

    @generates(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)
    def new_zeros(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.of([list(x.shape), list(d.shape())])), {}

    @generates(aten.new_full.default)
    def new_full(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.of([list(x.shape), list(d.shape())]), 3), {}

    @generates(aten.new_empty_strided.default)
    def new_empty_strided(d: Draw) -> Arguments:
        return (d.float(3), [2, 3], [3, 1]), {}

    @generates(aten.scalar_tensor.default)
    def scalar_tensor(d: Draw) -> Arguments:
        return (d.of([0, 1.5]),), {"dtype": d.dtype}

    @generates(aten.arange.default)
    def arange(d: Draw) -> Arguments:
        return (d.of([d.size(), 3.5]),), d.of([{}, {"dtype": torch.float32}])

    @generates(aten.arange.start)
    def arange_start(d: Draw) -> Arguments:
        return (d.int(-3, 3), 3 + d.size()), {"dtype": d.of([torch.int64, torch.float64])}

    @generates(aten.arange.start_step)
    def arange_step(d: Draw) -> Arguments:
        return d.of([(d.int(-3, 3), 3 + d.size(), d.int(1, 3)), (9, -9, -2), (0, 1, 0.25)]), {}

    @generates(torch.ops.prims.iota.default)
    def iota(d: Draw) -> Arguments:
        options = {"dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
        return (d.size(),), {"start": d.int(-2, 2), "step": d.int(1, 3), **options}

    @generates(aten.eye.default)
    def eye(d: Draw) -> Arguments:
        return (d.size(),), {}

    @generates(aten.eye.m, aten.tril_indices.default)
    def eye_m(d: Draw) -> Arguments:
        return (d.size(), d.size()), {}

    @generates(aten.linspace.default, aten.logspace.default)
    def linspace(d: Draw) -> Arguments:
        return (0.0, 1.0, d.size()), {}

    @generates(aten.rand.default, aten.randn.default)
    def rand(d: Draw) -> Arguments:
        return (list(d.shape()),), {}

    @generates(aten.randint.default)
    def randint(d: Draw) -> Arguments:
        return (9, list(d.shape())), {}

    @generates(aten.randint.low)
    def randint_low(d: Draw) -> Arguments:
        return (2, 9, list(d.shape())), {}

    @generates(aten.randperm.default)
    def randperm(d: Draw) -> Arguments:
        return (d.size(),), {}

    @generates(aten.rand_like.default, aten.randn_like.default, aten.normal_functional.default)
    def rand_like(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.bernoulli.default, aten.normal.Tensor_float)
    def bernoulli_of(d: Draw) -> Arguments:
        return (d.float(*d.shape()).sigmoid(),), {}

    @generates(aten.bernoulli.p)
    def bernoulli_p(d: Draw) -> Arguments:
        return (d.float(*d.shape()), 0.5), {}

    @generates(aten.native_dropout.default)
    def native_dropout(d: Draw) -> Arguments:
        return (d.float(*d.shape()), 0.5, True), {}

    @generates(aten.multinomial.default, dtypes=WIDE)
    def multinomial(d: Draw) -> Arguments:
        return (d.float(3, 5).abs(), 2), {}

    @generates(torch.ops.autopar.bernoulli.default)
    def bernoulli(d: Draw) -> Arguments:
        shape = list(d.shape())
        return (shape, 0.75, d.dtype, torch.device("cpu"), [0] * len(shape), list(shape)), {}


def enter_indexing() -> None:
    """Enter the generators of the indexing families."""

    @generates(aten.embedding.default)
    def embedding(d: Draw) -> Arguments:
        rows = d.size()
        return (d.float(rows, d.size()), d.index(rows, *d.shape(0, 3)), d.of([-1, 0])), {}

    @generates(aten.embedding_dense_backward.default, dtypes=WIDE)
    def embedding_dense_backward(d: Draw) -> Arguments:
        rows, shape = d.size(), d.shape(1, 3)
        return (d.float(*shape, d.size()), d.index(rows, *shape), rows, d.int(-1, rows - 1), d.int(0, 4) == 0), {}

    def along(d: Draw) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Draw a shape, a dim, and the shape of an index along it."""
        shape = d.shape(1)
        dim = d.dim(len(shape))
        index = [size if d.int(0, 3) else d.int(1, size) for size in shape]
        index[dim] = d.size()
        return shape, dim, tuple(index)

    @generates(aten.gather.default)
    def gather(d: Draw) -> Arguments:
        shape, dim, index = along(d)
        values = d.of([d.float, d.mask, lambda *s: d.index(9, *s)])(*shape)
        return (values, dim, d.index(shape[dim], *index)), {}

    @generates(aten.index_select.default)
    def index_select(d: Draw) -> Arguments:
        shape, dim, _ = along(d)
        return (d.float(*shape), dim, d.index(shape[dim], d.size())), {}

    @generates(aten.scatter_add.default, dtypes=WIDE)
    def scatter_add(d: Draw) -> Arguments:
        shape, dim, index = along(d)
        source = tuple(n + (d.int(0, 3) == 0) for n in index)
        return (d.float(*shape), dim, d.index(shape[dim], *index), d.float(*source)), {}

    @generates(aten.scatter.value)
    def scatter_value(d: Draw) -> Arguments:
        shape, dim, index = along(d)
        return (d.float(*shape), dim, d.index(shape[dim], *index), 1), {}

    @generates(aten.scatter.src)
    def scatter_src(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        order = d.float(*shape).argsort(dim)
        return (d.float(*shape), dim, order, d.float(*shape)), {}

    @generates(aten.index_add.default, dtypes=WIDE)
    def index_add(d: Draw) -> Arguments:
        shape, dim, _ = along(d)
        count = d.size()
        source = list(shape)
        source[dim] = count
        return (d.float(*shape), dim, d.index(shape[dim], count), d.float(*source)), d.of([{}, {"alpha": 2}])

    @generates(aten.searchsorted.Tensor, dtypes=WIDE)
    def searchsorted(d: Draw) -> Arguments:
        return (d.float(d.size()).sort().values, d.float(*d.shape(1))), {}

    @generates(aten.bucketize.Tensor, dtypes=WIDE)
    def bucketize(d: Draw) -> Arguments:
        return (d.float(*d.shape(1)), d.float(d.size()).sort().values), {}

    def indices(d: Draw, shape: tuple[int, ...]) -> list[Tensor | None]:
        """Draw indices for some dims of a shape, which broadcast together; some count from the end."""
        together = d.shape(0, 2)
        out: list[Tensor | None] = []
        for size in shape[: d.int(1, len(shape))]:
            index = d.index(size, *_broadcast(d, together))
            out.append(d.of([None, index, index - size]))
        if all(index is None for index in out):
            out[-1] = d.index(shape[len(out) - 1], *together)
        return out

    @generates(aten.index.Tensor, aten._unsafe_index.Tensor)
    def index(d: Draw) -> Arguments:
        shape = d.shape(1)
        values = d.of([d.float, d.mask])(*shape)
        return (values, indices(d, shape)), {}

    @generates(aten.index_put.default, aten._unsafe_index_put.default, dtypes=WIDE)
    def index_put(d: Draw) -> Arguments:
        shape = d.shape(1)
        at = indices(d, shape)
        x = d.float(*shape)
        accumulate = d.int(0, 3) > 0
        values = d.float(*_broadcast(d, tuple(aten.index.Tensor(x, at).shape)))
        if not accumulate:
            values = d.float()
        return (x, at, values, accumulate), {}


def enter_norms() -> None:
    """Enter the generators of the norms family."""

    def normed(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return d.shape(0, 3), d.shape(1, 2)

    @generates(aten.native_layer_norm.default)
    def layer_norm(d: Draw) -> Arguments:
        lead, inner = normed(d)
        weight, bias = d.of([(None, None), (d.float(*inner), d.float(*inner))])
        return (d.float(*lead, *inner), list(inner), weight, bias, 1e-5), {}

    @generates(aten._fused_rms_norm.default)
    def rms_norm(d: Draw) -> Arguments:
        lead, inner = normed(d)
        return (d.float(*lead, *inner), list(inner), d.of([None, d.float(*inner)]), 1e-5), {}

    @generates(aten.native_layer_norm_backward.default, dtypes=WIDE)
    def layer_norm_backward(d: Draw) -> Arguments:
        lead, inner = normed(d)
        x = d.float(*lead, *inner)
        weight, bias = d.of([(None, None), (d.float(*inner), d.float(*inner))])
        _, mean, rstd = aten.native_layer_norm(x, list(inner), weight, bias, 1e-5)
        mask = [True, weight is not None, weight is not None]
        return (d.float(*lead, *inner), x, list(inner), mean, rstd, weight, bias, mask), {}

    @generates(aten.native_group_norm.default, dtypes=WIDE)
    def group_norm(d: Draw) -> Arguments:
        n, group, space = d.size(), d.size(), d.shape(1, 2)
        c = group * d.int(1, 3)
        x = d.float(n, c, *space)
        return (x, *d.of([(None, None), (d.float(c), d.float(c))]), n, c, x[0, 0].numel(), group, 1e-5), {}

    @generates(aten.native_group_norm_backward.default, dtypes=WIDE)
    def group_norm_backward(d: Draw) -> Arguments:
        n, group, space = d.size(), d.size(), d.shape(1, 2)
        c = group * d.int(1, 3)
        x, weight = d.float(n, c, *space), d.float(c)
        sizes = (n, c, x[0, 0].numel(), group)
        _, mean, rstd = aten.native_group_norm(x, weight, None, *sizes, 1e-5)
        return (d.float(*x.shape), x, mean, rstd, weight, *sizes, [True, True, True]), {}

    def batch(d: Draw) -> tuple[Tensor, int]:
        c = d.size()
        return d.float(d.int(2, 6), c, *d.shape(1, 2)), c

    @generates(aten._native_batch_norm_legit_functional.default, dtypes=WIDE)
    def batch_norm(d: Draw) -> Arguments:
        x, c = batch(d)
        return (x, d.float(c), d.float(c), d.float(c), d.float(c).abs(), d.bool(), 0.1, 1e-5), {}

    @generates(aten._native_batch_norm_legit_no_training.default, dtypes=WIDE)
    def batch_norm_fixed(d: Draw) -> Arguments:
        x, c = batch(d)
        return (x, d.float(c), d.float(c), d.float(c), d.float(c).abs(), 0.1, 1e-5), {}

    @generates(aten._native_batch_norm_legit.no_stats, dtypes=WIDE)
    def batch_norm_no_stats(d: Draw) -> Arguments:
        x, c = batch(d)
        return (x, d.float(c), d.float(c), True, 0.1, 1e-5), {}


def _convolution(d: Draw) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
    """Draw the operands of a convolution and the arguments after the bias."""
    groups, transposed, space = d.of([1, 1, 1, 2, 3, 4]), d.int(0, 3) == 0, d.int(1, 2)
    small = [1, 2, 3, 4, 6]
    c, o = (groups * d.of(small), groups * d.of(small))
    kernel = [d.int(1, 3) for _ in range(space)]
    x = d.float(d.of(small), c, *[d.int(3, 6) for _ in range(space)])
    weight = d.float(*((c, o // groups) if transposed else (o, c // groups)), *kernel)
    rest = [[d.int(1, 2)] * space, [d.int(0, 1)] * space, [1] * space, transposed, [0] * space, groups]
    return x, weight, d.of([None, d.float(o)]), rest


def enter_images() -> None:
    """Enter the generators of the convolution family."""

    @generates(aten.convolution.default, dtypes=WIDE)
    def convolution(d: Draw) -> Arguments:
        x, weight, bias, rest = _convolution(d)
        return (x, weight, bias, *rest), {}

    @generates(aten.convolution_backward.default, dtypes=WIDE)
    def convolution_backward(d: Draw) -> Arguments:
        x, weight, bias, rest = _convolution(d)
        out = aten.convolution(x, weight, bias, *rest)
        mask = [d.bool(), True, bias is not None]
        sizes = None if bias is None else list(bias.shape)
        return (d.float(*out.shape), x, weight, sizes, *rest, mask), {}

    def image(d: Draw, space: int = 2) -> Tensor:
        """Draw images, sometimes without a batch."""
        return d.float(*d.shape(1, 2), *[d.int(4, 6) for _ in range(space)])

    @generates(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, dtypes=WIDE)
    def pool(d: Draw) -> Arguments:
        return (image(d), [2, 2], [d.int(1, 2)] * 2, [d.int(0, 1)] * 2), {}

    @generates(aten.max_pool3d_with_indices.default, aten.avg_pool3d.default, dtypes=WIDE)
    def pool_of_volumes(d: Draw) -> Arguments:
        return (image(d, 3), [2, 2, 2], [2, 1, 2]), {}

    @generates(aten.avg_pool1d.default, dtypes=WIDE)
    def pool_of_lines(d: Draw) -> Arguments:
        return (image(d, 1), [2], [d.int(1, 2)]), {}

    @generates(aten.max_pool2d_with_indices_backward.default, dtypes=WIDE)
    def pool_backward(d: Draw) -> Arguments:
        x = image(d)
        out, at = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        return (d.float(*out.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, at), {}

    @generates(aten.max_pool3d_with_indices_backward.default, dtypes=WIDE)
    def pool_of_volumes_backward(d: Draw) -> Arguments:
        x = image(d, 3)
        out, at = aten.max_pool3d_with_indices(x, [2, 2, 2], [2, 2, 2])
        return (d.float(*out.shape), x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, at), {}

    @generates(aten.avg_pool2d_backward.default, dtypes=WIDE)
    def avg_pool_backward(d: Draw) -> Arguments:
        x = image(d)
        out = aten.avg_pool2d(x, [2, 2], [2, 2])
        return (d.float(*out.shape), x, [2, 2], [2, 2], [0, 0], False, True, None), {}

    @generates(aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default, dtypes=WIDE)
    def adaptive(d: Draw) -> Arguments:
        return (image(d), [d.int(1, 3), 2]), {}

    @generates(aten._adaptive_avg_pool3d.default, dtypes=WIDE)
    def adaptive_volumes(d: Draw) -> Arguments:
        return (image(d, 3), [1, 2, 2]), {}

    @generates(aten._adaptive_avg_pool2d_backward.default, dtypes=WIDE)
    def adaptive_backward(d: Draw) -> Arguments:
        x = image(d)
        return (d.float(*x.shape[:-2], 2, 2), x), {}

    @generates(aten.adaptive_max_pool2d_backward.default, dtypes=WIDE)
    def adaptive_max_backward(d: Draw) -> Arguments:
        x = image(d)
        out, at = aten.adaptive_max_pool2d(x, [2, 2])
        return (d.float(*out.shape), x, at), {}

    def batch(d: Draw) -> Tensor:
        return d.float(d.size(), d.size(), d.int(2, 4), d.int(2, 4))

    @generates(aten.upsample_nearest2d.vec, dtypes=WIDE)
    def nearest_vec(d: Draw) -> Arguments:
        return (batch(d), [5, 6], None), {}

    @generates(aten.upsample_bilinear2d.vec, dtypes=WIDE)
    def bilinear_vec(d: Draw) -> Arguments:
        return (batch(d), [5, 6], False, None), {}

    @generates(aten.upsample_nearest2d.default, dtypes=WIDE)
    def nearest(d: Draw) -> Arguments:
        return (batch(d), [5, 6]), {}

    @generates(aten.upsample_bilinear2d.default, dtypes=WIDE)
    def bilinear(d: Draw) -> Arguments:
        return (batch(d), [5, 6], False), {}

    @generates(aten.upsample_nearest2d_backward.default, dtypes=WIDE)
    def nearest_backward(d: Draw) -> Arguments:
        x = batch(d)
        return (d.float(*x.shape[:2], 5, 6), [5, 6], list(x.shape)), {}

    @generates(aten.upsample_bilinear2d_backward.default, dtypes=WIDE)
    def bilinear_backward(d: Draw) -> Arguments:
        x = batch(d)
        return (d.float(*x.shape[:2], 5, 6), [5, 6], list(x.shape), False), {}

    @generates(aten.reflection_pad2d.default, aten.replication_pad2d.default, dtypes=WIDE)
    def pad(d: Draw) -> Arguments:
        return (image(d), [1, 0, 1, 1]), {}

    @generates(aten.reflection_pad1d.default, dtypes=WIDE)
    def pad_lines(d: Draw) -> Arguments:
        return (image(d, 1), [1, 1]), {}


def enter_attention() -> None:
    """Enter the generators of the attention family."""

    def operands(d: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float, int]:
        batch, groups, queries, width, value_width = d.size(), d.of([1, 2, 3, 4]), d.size(), d.int(1, 4), d.int(1, 4)
        heads = groups * d.int(1, 3)
        offset = d.int(0, 2)
        keys = queries + offset
        mask_shape = [n if d.bool() else 1 for n in (batch, heads, queries, keys)]
        mask = d.of([None, d.mask(*mask_shape), d.float(*mask_shape)])
        if mask is not None and mask.dtype is torch.bool:
            mask[..., 0] = True
        q, k, v = d.float(batch, heads, queries, width), d.float(batch, groups, keys, width), None
        v = d.float(batch, groups, keys, value_width)
        return q, k, v, mask, d.bool(), 0.5, offset

    @generates(torch.ops.autopar.attention.default, dtypes=WIDE)
    def attention(d: Draw) -> Arguments:
        return operands(d), {}

    @generates(torch.ops.autopar.attention_backward.default, dtypes=WIDE)
    def attention_backward(d: Draw) -> Arguments:
        q, k, v, *rest = operands(d)
        out, lse = torch.ops.autopar.attention(q, k, v, *rest)
        return (d.float(*out.shape), q, k, v, out, lse, *rest), {}


enter_slices()
enter_factories()
enter_indexing()
enter_norms()
enter_images()
enter_attention()
