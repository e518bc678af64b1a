"""The cluster benchmark: its cases are read, the published configuration is priced near what was published."""

from __future__ import annotations

import json

import pytest

from benchmarks import cluster_search
from benchmarks.cluster_search import CASES, read_case


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    """Every case's published configuration fills its cluster and its batch, and its depth is the model's own."""
    case = read_case(name)
    candidate = case.published()
    ranks = candidate.stages * candidate.data
    for size in candidate.inner:
        ranks *= size
    assert ranks == case.hardware.num_ranks == case.run.num_devices
    assert candidate.data * candidate.micro_batch * candidate.micro_batches == case.batch
    assert case.layers == case.run.layers


def test_published_configuration_is_priced_within_ten_percent() -> None:
    """The 530B model on 2,240 devices, as it was trained, takes what was published within a tenth."""
    case = read_case("mt-nlg-530b")
    found = case.price_published(case.searcher())
    assert found is not None
    assert found.step_s == pytest.approx(case.run.seconds, rel=0.1)


def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    """``--case`` and ``--json`` write the rows that were measured, and a table is printed."""
    row = dict.fromkeys(cluster_search.COLUMNS, 0) | {"case": "llama3-8b"}
    monkeypatch.setattr(cluster_search, "measure", lambda name: row | {"case": name})
    cluster_search.main(["--case", "llama3-8b", "--json", str(tmp_path / "rows.json")])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["case"] == "llama3-8b"
    assert "published_config_step_s" in capsys.readouterr().out
