"""Calibration: what it writes is a profile that prices plans."""

import json

import pytest

from autopar.errors import OptionError
from autopar.mesh import Mesh
from autopar.passes.cost.devices import Link, device, link, mesh_links
from autopar.runtime import calibrate as module


@pytest.fixture(scope="module")
def profile():
    """Return the profile of this machine without processes, measured in little time."""
    return module.calibrate("cpu", budget_s=2.0)


def test_the_file_is_a_profile(profile, tmp_path):
    """The path of the written file is a device name, and its links exist."""
    path = tmp_path / "here.json"
    path.write_text(json.dumps(module.name_links(profile, str(path))))
    found = device(str(path))
    assert found.flops_per_s("float32") > 1e8
    assert found.launch_s > 0
    assert set(profile["device"]["sources"]) == set(profile["device"]) - {"description", "sources"}
    assert mesh_links(Mesh((2,), device=str(path)))[0] == link("shared_memory")


def test_measurements_are_kept(profile):
    """Every figure can be checked against the measurements behind it."""
    rows = profile["measurements"]["products"]
    best = max(row["flops_per_s"] for row in rows if row["dtype"] == "float32")
    assert profile["device"]["peak_flops"]["float32"] == best


def test_fitted_link_prices_what_was_measured(monkeypatch, tmp_path):
    """A link fitted to times of a known latency and bandwidth gives them back."""
    monkeypatch.setattr(module.dist, "get_backend", lambda: "gloo")
    true = Link("true", 2e-5, 1e9, 1e-4)
    moves = [
        {"kind": kind, "bytes": size, "s": float(module._priced(kind, 4, size, true, device("cpu")))}
        for kind in module.KINDS
        for size in module.MESSAGE_BYTES
    ]
    made = module._link_profile(moves, 4, device("cpu"))
    path = tmp_path / "here.json"
    path.write_text(json.dumps({"device": {}, "links": {"group": made}}))
    wire = link(f"{path}:group")
    for row in moves:
        predicted = module._priced(row["kind"], 4, row["bytes"], wire, device("cpu"))
        assert predicted == pytest.approx(row["s"], rel=0.05)
    assert wire.bytes_per_s == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize(
    ("where", "seconds", "words"),
    [("tpu", 1.0, "cpu or cuda"), ("cpu", 0.0, "positive"), ("cpu", float("nan"), "positive")],
)
def test_bad_arguments(where, seconds, words, tmp_path):
    """What can't be measured is refused before anything runs."""
    with pytest.raises(OptionError, match=words):
        module.calibrate_processes(where, seconds, str(tmp_path / "here.json"))


def test_a_file_that_cannot_be_written(monkeypatch):
    """A place that can't be written is named."""
    monkeypatch.setattr(module, "calibrate", lambda *a, **k: {"device": {}, "links": {}, "measurements": {}})
    with pytest.raises(OptionError, match="can't be written"):
        module.calibrate_processes("cpu", 1.0, "/no/such/folder/here.json")
