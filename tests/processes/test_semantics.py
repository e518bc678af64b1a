"""A parallel module behaves as the original does towards autograd, optimizers and its caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.processes import carried_hooks, missing_outputs, semantics
from tests.processes.pool import Pool

pytestmark = pytest.mark.processes
Pools = Callable[[int], Pool]


def assert_small(errors: semantics.Errors, tolerance: float = 1e-4) -> None:
    """Check every error against the tolerance."""
    assert {what: error for what, error in errors.items() if not error[0] < tolerance} == {}


@pytest.mark.parametrize(("outputs", "kind"), [("auto", "Tensor"), ("lie", "DTensor")])
def test_outputs_and_gradients(pool: Pools, outputs: str, kind: str) -> None:
    """A module without a loss: outputs full or where they lie, differentiable, with gradients of inputs too."""
    for errors, facts in pool(2).run(semantics.outputs_and_gradients, (2,), outputs):
        assert_small(errors)
        assert facts["kinds"] == {"logits": kind, "hidden": kind, "count": kind, "power": "int"}
        assert facts["power"] == 2
        assert facts["tied"] and facts["unused"] and facts["keys"]
        assert facts["frozen"] == ["frozen.weight", "frozen.bias"]
        assert "shift" in facts["buffers"]


@pytest.mark.parametrize("how", ["best", "random"])
def test_autograd(pool: Pools, how: str) -> None:
    """Backward calls accumulate, scale, interleave and repeat as on one device, or are refused."""
    results = pool(4).run(semantics.autograd, "mlp", (2, 2), how)
    assert_small(results[0][0])
    for _, facts in results:
        assert facts["twice"][0] == "RuntimeError" and "second time" in facts["twice"][1]
        assert facts["changed before backward"][0] == "InputError"


def test_clipping(pool: Pools) -> None:
    """The gradient norm is that of one device for every kind of norm, and so are the clipped gradients."""
    assert_small(pool(4).run(semantics.clipping, "gpt2", (2, 2), "random")[0])


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2,)), ("gpt2", (2, 2))])
def test_local_inputs(pool: Pools, name: str, sizes: tuple[int, ...]) -> None:
    """Each rank passes its own share; the loss is that of the global batch on every rank."""
    results = pool(2 if sizes == (2,) else 4).run(semantics.local_inputs, name, sizes)
    assert_small(results[0][1])
    assert len(set(results[0][0])) == 1


def test_planned_at_the_first_call(pool: Pools) -> None:
    """Without an example the first call plans; an optimizer built before keeps its parameters."""
    for errors, facts in pool(2).run(semantics.lazy, "mlp", (2,)):
        assert_small(errors)
        assert facts["before"][0] == "InputError"
        assert facts["kept"] and facts["rests"]


def test_loss_behind_a_module(pool: Pools) -> None:
    """``loss=`` puts a loss behind a module that has none; targets are the last inputs."""
    for errors in pool(2).run(semantics.with_loss, (2,)):
        assert_small(errors)


def test_outputs_beside_a_loss(pool: Pools) -> None:
    """Beside a loss other outputs lie where they are."""
    for kinds in pool(2).run(semantics.inner_output, (2,)):
        assert kinds == {"loss": "Tensor", "logits": "DTensor", "out": "CausalLMOutputWithCrossAttentions"}


@pytest.mark.parametrize("how", ["best", "random"])
def test_gradients_beside_a_loss(pool: Pools, how: str) -> None:
    """A gradient that reaches an output beside the loss makes the call run again: masks, buffers and None as before."""
    for errors, facts in pool(2).run(semantics.beside_loss, (2,), how):
        assert_small(errors)
        assert facts.pop("none") == [[True, True], [False, False], [True, True], [False, False]]
        refused = facts.pop("changed")
        assert refused[0] == "InputError" and "shift was changed in place" in refused[1]
        assert all(facts.values()), facts


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_written_input(pool: Pools, inputs: str) -> None:
    """An input that the model writes to is changed in place, also where each rank has its share."""
    for ranks in pool(2).run(semantics.written_input, (2,), inputs):
        for errors in ranks:
            assert_small(errors)


def test_stale_optimizer(pool: Pools) -> None:
    """An optimizer of the original's parameters is refused instead of doing nothing."""
    for refused in pool(2).run(semantics.stale_optimizer, (2,)):
        assert refused[0] == "OptionError" and "build the optimizer from the parallel module" in refused[1]


def test_constants(pool: Pools) -> None:
    """A tensor that is a plain attribute of the module has the first rank's value everywhere."""
    assert pool(2).run(semantics.constants, (2,)) == [[8.0], [8.0]]


def test_constrained(pool: Pools) -> None:
    """Constraints decide where parameters rest, and stay in force for a second shape."""
    for errors, rests in pool(2).run(semantics.constrained, (2,)):
        assert_small(errors)
        assert rests["up.weight"] == "(Shard(dim=0),)"
        assert rests["down.weight"] == "(Shard(dim=1),)"


def test_every_output(pool: Pools) -> None:
    """With ``outputs="full"`` gradients may reach every output, also beside a loss."""
    assert_small(pool(2).run(semantics.every_output, (2,))[0])


def test_random_state(pool: Pools) -> None:
    """Copies of one script go on from the first rank's state; ranks with shares of their own keep theirs."""
    first, second = pool(2).run(semantics.random_state, (2,), "global")
    assert first == second and not first[0]
    first, second = pool(2).run(semantics.random_state, (2,), "local")
    assert second[0] and not first[0] and first[1] != second[1]


def test_optimizers(pool: Pools) -> None:
    """Optimizers of torch step split parameters as whole ones: by loops, foreach and fused."""
    assert_small(pool(2).run(semantics.optimizers, (2,))[0])


def test_hooks_on_parameters(pool: Pools) -> None:
    """Hooks from before ``parallelize`` see whole gradients, later ones gradients as they lie, none sums that wait."""
    assert_small(pool(2).run(carried_hooks.hooks_on_parameters, (2,))[0])


def test_backwards_that_reach_some_outputs(pool: Pools) -> None:
    """Beside others that reach all of them, whose gradients wait for each other."""
    assert_small(pool(2).run(missing_outputs.some_outputs, (2,))[0])
