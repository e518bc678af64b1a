"""Arguments of the public functions: what is accepted, and what every refusal says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autopar.arguments import (
    check_compile,
    check_disable,
    check_examples,
    check_memory,
    check_mesh,
    check_module,
    check_options,
    check_plan_source,
)
from autopar.errors import MeshError, OptionError
from autopar.mesh import Mesh
from autopar.passes.cost.memory import OptimizerBytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (5, 5), (1e9, 10**9), ("40GB", 40 * 10**9), ("2 GiB", 2 * 2**30), ("1.5KiB", 1536), ("77", 77)],
)
def test_memory_in_bytes(given: Any, expected: int | None) -> None:
    """A budget is a number of bytes or a text with a unit."""
    assert check_memory(given) == expected


@pytest.mark.parametrize("given", [0, -1, math.nan, math.inf, "", "lots", "-3GB", "4 GG", True, [1], "0GB", "nanGB"])
def test_memory_refused(given: Any) -> None:
    """A budget that means nothing is refused, with what to write instead."""
    with pytest.raises(OptionError, match=r"memory"):
        check_memory(given)


def test_meshes() -> None:
    """A mesh is itself, a number of ranks or a tuple of sizes."""
    assert check_mesh(4).sizes == (4,)
    assert check_mesh((2, 3)).sizes == (2, 3)
    mesh = Mesh((2, 2), ("data", "model"))
    assert check_mesh(mesh) is mesh


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("4y8 h100", "is no cluster"),
        ("4x8 h1", "no device profile"),
        (0, "at least one"),
        (True, "takes"),
        ((2, "x"), "takes"),
    ],
)
def test_meshes_refused(given: Any, words: str) -> None:
    """Anything else is refused, with what is accepted."""
    with pytest.raises(MeshError, match=words):
        check_mesh(given)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("optimizer", "shampoo", "'adamw'.*OptimizerBytes"),
        ("inputs", "sharded", "'global', 'local'"),
        ("outputs", "all", "'auto', 'full', 'lie'"),
        ("constraints", ["column"], "dict"),
        ("constraints", {"a": 3}, "dict"),
    ],
)
def test_options_refused(name: str, value: Any, words: str) -> None:
    """An unknown option value is refused, with the known ones."""
    options = {"optimizer": "adamw", "memory": None, "constraints": None, "inputs": "global", "outputs": "auto"}
    with pytest.raises(OptionError, match=words):
        check_options(**{**options, name: value})


def test_options_are_ordered() -> None:
    """Constraints written in another order are the same options."""
    make = lambda constraints: check_options("sgd", None, constraints, "global", "auto")  # noqa: E731
    assert list(make({"b": "row", "a": "column"}).constraints) == ["a", "b"]


def test_examples() -> None:
    """Examples are a tuple, a list, a tensor or a dict; keywords come back sorted."""
    x = torch.zeros(2)
    assert check_examples(x, None) == ((x,), {})
    assert check_examples([1, 2], None) == ((1, 2), {})
    assert list(check_examples({"b": 1, "a": 2}, None)[1]) == ["a", "b"]
    assert check_examples(None, {"x": 1}) == ((), {"x": 1})


@pytest.mark.parametrize(("inputs", "kwargs"), [(3, None), ({"x": 1}, {"y": 2}), ((), [1]), ((), {1: 2})])
def test_examples_refused(inputs: Any, kwargs: Any) -> None:
    """Other examples are refused."""
    with pytest.raises(OptionError):
        check_examples(inputs, kwargs)


def test_model_and_plan_refused() -> None:
    """A model that is no module and a plan that is no plan are refused."""
    with pytest.raises(OptionError, match=r"torch\.nn\.Module; got function"):
        check_module(lambda x: x)
    with pytest.raises(OptionError, match=r"autopar\.Plan or the path"):
        check_plan_source({"plan": 1})


def test_an_optimizer_object_is_refused_in_one_line() -> None:
    """The name is asked for, and where the object belongs is said."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(OptionError, match=r"one of 'adafactor', 'adagrad'.*got SGD\. Build") as refused:
        check_options(optimizer, None, None, "global", "auto")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("sizes", [2, "24", (2.5,), (2, "4"), (True,), None, {2, 4}])
def test_sizes_of_a_mesh_are_whole_numbers(sizes: Any) -> None:
    """Nothing is rounded, read as digits or taken in a set's order."""
    with pytest.raises(MeshError, match="whole numbers, one an axis"):
        Mesh(sizes)


@pytest.mark.parametrize("options", [{"names": "ab"}, {"links": "xy"}, {"names": (1, 2)}])
def test_names_of_a_mesh_are_texts(options: dict[str, Any]) -> None:
    """One text is not one name a letter."""
    with pytest.raises(MeshError, match="one text an axis"):
        Mesh((2, 2), **options)


def test_overlap_is_a_yes_or_no() -> None:
    """Anything else is refused with what it may be."""
    assert check_options("sgd", None, None, "global", "auto", overlap=True).overlap
    with pytest.raises(OptionError, match="overlap='yes' means nothing"):
        check_options("sgd", None, None, "global", "auto", overlap="yes")


def test_at_once_needs_a_budget() -> None:
    """Without a budget there is nothing to fit into."""
    assert check_options("sgd", "1GB", None, "global", "auto", at_once=True).at_once
    for memory, at_once in ((None, True), ("1GB", "yes")):
        with pytest.raises(OptionError, match="give a budget"):
            check_options("sgd", memory, None, "global", "auto", at_once=at_once)


def test_own_optimizers() -> None:
    """An entry of one's own is an option like a name, and is read back from the plan's text."""
    options = check_options(OptimizerBytes("mine", moments=3), None, None, "global", "auto")
    assert options.optimizer == "mine{moments=3}"
    assert check_options(options.optimizer, None, None, "global", "auto") == options


def test_passes_to_leave_out_and_compilation() -> None:
    """Names of passes come in any order; what is no list, no pass or no truth value is refused."""
    assert check_disable(["wait_late", "issue_early", "wait_late"]) == ("issue_early", "wait_late")
    with pytest.raises(OptionError, match=r"takes a list of names of passes, .* got 'wait_late'"):
        check_disable("wait_late")
    with pytest.raises(OptionError, match=r"no pass by 'hurry'; there are merge_equal, .*reduce_in_place"):
        check_disable(["hurry"])
    assert check_compile(True)
    with pytest.raises(OptionError, match=r"compile= takes True or False; got 'max'"):
        check_compile("max")
