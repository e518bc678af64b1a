"""The seconds of a plan with stages: those of its schedule, from the decision that it runs."""

from __future__ import annotations

import pytest

import autopar
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.passes.pipeline_plan import choose_pipeline, cut_program, stage_mesh
from autopar.passes.price_regions import Pricing
from autopar.passes.price_stages import price_stages, spans_of
from autopar.passes.schedules import make_schedule
from autopar.passes.solve.decide import Decided
from autopar.plans import Cost, Options
from tests import models

MESH = Mesh((2, 2), ("pp", "data"), "h100")


@pytest.mark.parametrize(("name", "cut"), [("tied", "layers.1"), ("unet", "middle")])
def test_the_stages_are_the_decision(name: str, cut: str) -> None:
    """All stages together, of all micro-batches, take what the decision says of a step; gradients are added besides."""
    model, args, kwargs = getattr(models, name)(0.1)
    program, options = annotate(capture(model, args, kwargs)), Options(micro_batches=4)
    part = cut_program(program, choose_pipeline(program, MESH, options), "auto")
    seen: list[Decided] = []

    def price(decided: Decided) -> Cost:
        seen.append(decided)
        return price_stages(part, decided, (cut,), make_schedule("1f1b", 2, 4), MESH)

    plan = make_plan(part, stage_mesh(MESH), options, loops=True, price=price)
    works = Pricing(part, seen[0], spans_of(part, (cut,)), loops=True).works()
    each = sum(work[kind].seconds for work in works for kind in ("forward", "input", "weight"))
    once = sum(work["once"].seconds for work in works)
    assert 4 * each + once == pytest.approx(seen[0].seconds, rel=1e-9)
    assert once > 0 and all(work["forward"].seconds > 0 for work in works)
    assert seen[0].seconds / 2 < plan.cost.compute_seconds < plan.cost.step_seconds < 2 * seen[0].seconds


def test_more_micro_batches_wait_less() -> None:
    """The part of the step that is waited falls with their number; the plan says what its schedule takes."""
    model, args, _ = models.stack(layers=4)
    shares = []
    for count in (2, 8):
        plan = autopar.plan(model, Mesh((2,), ("pp",), "h100"), args, micro_batches=count, schedule="gpipe")
        shares.append(plan.cost.communication_seconds / plan.step_seconds)
        assert "fullest rank busy" in str(plan)
    assert shares[1] < shares[0]


def test_a_stage_keeps_its_links() -> None:
    """The mesh inside a stage has the links of the whole one, where the pipeline axis is the fast one too."""
    assert stage_mesh(Mesh((4, 8), ("data", "pp"), "h100")).links == ("infiniband_400",)
    assert stage_mesh(Mesh((4, 8), ("pp", "model"), "h100")).links == ()
    assert stage_mesh(Mesh((2, 2), ("pp", "data"), "h100", ("nvlink4", "ethernet_10"))).links == ("ethernet_10",)
