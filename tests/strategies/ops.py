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
        if name == "masked_fill" and argument.name == "value":
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

for _name in [*elementwise.PLAIN, *elementwise.FIRST, *["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"],
              *["masked_fill", "addcmul", "addcdiv", "lerp"]]:  # fmt: skip
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
