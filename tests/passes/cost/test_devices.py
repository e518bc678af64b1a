"""Profiles: complete, sourced, read with distrust; the link of every axis."""

import json
from importlib import resources

import pytest

from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.passes.cost.devices import axis_links, device, known_devices, known_links, link, mesh_links

FOLDER = resources.files("autopar.passes.cost") / "profiles"


def read(name):
    """Return the content of a profile file."""
    return json.loads((FOLDER / name).read_text())


@pytest.mark.parametrize("name", known_devices())
def test_every_device_loads(name):
    """A profile is complete, its links exist, and it computes slower than its peak."""
    profile = device(name)
    link(profile.link_inside)
    link(profile.link_between)
    assert profile.flops_per_s("float32") <= profile.peak_flops["float32"]
    assert profile.flops_per_s("no such dtype") == profile.flops_per_s("float32")
    assert profile.stream_bytes_per_s <= profile.memory_bytes_per_s


@pytest.mark.parametrize("file", ["devices.json", "links.json"])
def test_every_figure_has_a_source(file):
    """No figure stands without a source, and no source without a figure."""
    for name, figures in read(file).items():
        if "alias" in figures:
            assert figures["alias"] in read(file), name
            continue
        assert set(figures["sources"]) == set(figures) - {"description", "sources"}, name
        assert all(len(source) > 10 for source in figures["sources"].values()), name


def test_devices_asked_for_exist():
    """The devices and the links that the documentation promises are there."""
    asked = ["v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "l4", "rtx4090", "cpu"]
    assert set(asked) <= set(known_devices())
    assert {"nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie4"} <= set(known_links())
    assert {f"infiniband_{speed}" for speed in (100, 200, 400, 800)} <= set(known_links())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h1000", "known are a100"),
        ("/no/such/file.json", "can't be read"),
    ],
)
def test_unknown_device(name, words):
    """An unknown device is refused with what is known and how to add it."""
    with pytest.raises(MeshError, match=words):
        device(name)


@pytest.mark.parametrize(
    "name", ["nvlink9", "nvlink4*+infiniband_400", "nvlink4*8+nothing", "nvlink4*0+infiniband_400"]
)
def test_unknown_link(name):
    """An unknown or ill-written link is refused."""
    with pytest.raises(MeshError, match="link"):
        link(name)


GOOD = {
    "peak_flops": {"float32": 1e12},
    "achievable": 0.5,
    "memory_bytes_per_s": 1e11,
    "launch_s": 0.0,
    "memory_bytes": 1000,
    "devices_per_node": 8,
    "link_inside": "pcie4",
    "link_between": "ethernet",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"achievable": 1.2}, "at most 1"),
        ({"achievable": float("nan")}, "no JSON|positive"),
        ({"memory_bytes": -1}, "positive finite"),
        ({"launch_s": "fast"}, "positive finite"),
        ({"peak_flops": {"float64": 1}}, "at least float32"),
        ({"peak_flops": {"float32": 0}}, "peak_flops of float32"),
        ({"memory_bytes_per_s": None}, "memory_bytes_per_s"),
        ({"link_inside": 3}, "must name a link"),
    ],
)
def test_profile_files(tmp_path, change, words):
    """A file is a profile when its figures are possible; else the error names the figure."""
    path = tmp_path / "mine.json"
    links = {"wire": {"latency_s": 1e-6, "bytes_per_s": 1e9}, "broken": {"latency_s": 1e-6}}
    path.write_text(json.dumps({"device": {**GOOD, **change}, "links": links}))
    if words is None:
        assert device(str(path)).memory_bytes == 1000
        assert link(f"{path}:wire").bytes_per_s == 1e9
        with pytest.raises(MeshError, match="lacks bytes_per_s"):
            link(f"{path}:broken")
        return
    with pytest.raises(MeshError, match=words):
        device(str(path))


def test_profile_file_lacks_a_figure(tmp_path):
    """A missing figure is named."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"device": {key: value for key, value in GOOD.items() if key != "launch_s"}}))
    with pytest.raises(MeshError, match="lacks launch_s"):
        device(str(path))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8,), ("nvlink4",)),
        ((4, 8), ("infiniband_400", "nvlink4")),
        ((32,), ("nvlink4*8+infiniband_400",)),
        ((16, 2), ("nvlink4*4+infiniband_400", "nvlink4")),
        ((2, 2, 2), ("nvlink4", "nvlink4", "nvlink4")),
        ((2, 16), ("infiniband_400", "nvlink4*8+infiniband_400")),
    ],
)
def test_link_of_each_axis(sizes, expected):
    """An axis inside a node takes the fast link, between nodes the network, and one that spans both is joined."""
    assert axis_links(sizes, 8, "nvlink4", "infiniband_400") == expected
    assert tuple(one.name for one in mesh_links(Mesh(sizes, device="h100"))) == expected


def test_a_shared_port_is_divided():
    """Groups that pass through one port at the same time have a part of it each."""
    assert axis_links((2, 8), 8, "nvlink2", "ethernet_25") == ("ethernet_25/8", "nvlink2")
    assert link("ethernet_25/8").bytes_per_s == link("ethernet_25").bytes_per_s / 8
    spanning = link("nvlink2*8+ethernet_25")
    assert spanning.bytes_per_s == link("ethernet_25").bytes_per_s
    assert link("nvlink3*8+infiniband_200").bytes_per_s == 8 * link("infiniband_200").bytes_per_s


CPU_FIGURES = {
    "peak_flops": {"float32": 1e11}, "achievable": 1.0, "memory_bytes_per_s": 1e9, "launch_s": 1e-6,
    "memory_bytes": 1e10, "devices_per_node": 4, "link_inside": "shared_memory", "link_between": "shared_memory",
}  # fmt: skip


def written(tmp_path, **figures):
    """Return the name of a device profile with these figures more."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"device": {**CPU_FIGURES, **figures}, "links": {}}))
    return str(path)


def test_a_stream_curve_is_interpolated(tmp_path):
    """Small ops run at the rate of the caches, large ones at that of memory; between them by the logarithm."""
    found = device(written(tmp_path, stream_curve=[[1e4, 4e9], [1e6, 1e9]]))
    assert found.stream_seconds(1e3) == pytest.approx(1e3 / 4e9)
    assert found.stream_seconds(1e5) == pytest.approx(1e5 / 2e9)
    assert found.stream_seconds(1e8) == pytest.approx(1e8 / 1e9)
    assert device(written(tmp_path)).stream_seconds(1e4) == 1e4 / 1e9


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"stream_curve": [[1e6, 1e9], [1e4, 4e9]]}, "ascending"),
        ({"stream_curve": [[1e6]]}, "pairs"),
        ({"stream_curve": [[1e4, -1.0]]}, "a figure of stream_curve"),
        ({"shares": [1]}, "shares"),
        ({"shares": {"attention": 0}}, "the share of attention"),
        ({"calls": {"aten.gelu": -1e-6}}, "the call of aten.gelu"),
        ({"view_s": -1e-6}, "view_s"),
        ({"draw_s": "slow"}, "draw_s"),
    ],
)
def test_bad_figures_of_calls_are_refused(tmp_path, figures, words):
    """What calibration adds is checked like every other figure."""
    with pytest.raises(MeshError, match=words):
        device(written(tmp_path, **figures))
