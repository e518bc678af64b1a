"""Arguments for elementwise ops, read off their schemas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.passes.rules import elementwise, families
from tests.strategies.op_draws import FLOATS, WIDE, Arguments, Draw, Generator, broadcast, generates

families.load()

aten = torch.ops.aten


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
        shape = full if first or exact else broadcast(d, full)
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


def enter_elementwise() -> None:
    """Enter the generators of the elementwise family."""
    sums = ["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"]
    for name in [*elementwise.PLAIN, *elementwise.FIRST, *sums, "masked_fill", "addcmul", "addcdiv", "lerp"]:
        for target in elementwise.overloads(name):
            generates(target, dtypes=WIDE if name in ONLY_WIDE else FLOATS)(_elementwise(target))
    for target in (aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf):
        generates(target)(_elementwise(target))
    generates(aten._to_copy.default)(_elementwise(aten._to_copy.default))
    generates(torch.ops.prims.convert_element_type.default)(
        lambda d: ((d.float(*d.shape()), d.of([torch.float64, torch.bfloat16, torch.float32])), {})
    )
