"""Clusters written as text, and the meshes on them."""

import pytest

import autopar
from autopar.arguments import check_mesh
from autopar.errors import MeshError
from autopar.mesh import Mesh


def test_nodes_and_devices() -> None:
    """The default mesh of a cluster has an axis between nodes and one inside, each with its own link."""
    cluster = autopar.Cluster("4x8 h100")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device, cluster.num_ranks) == (4, 8, "h100", 32)
    assert cluster.mesh() == Mesh((4, 8), ("node", "device"), "h100", ("infiniband_400", "nvlink4"))
    assert check_mesh("4x8 h100") == check_mesh(cluster) == cluster.mesh()


def test_one_node_and_one_device() -> None:
    """A single node has one axis, also when it is written without the nodes."""
    assert autopar.Cluster("8 a100").mesh() == autopar.Cluster("1x8 a100").mesh()
    assert autopar.Cluster("8 a100").mesh().sizes == (8,)
    assert autopar.Cluster("1x1 cpu").mesh().sizes == (1,)


def test_nodes_smaller_than_usual() -> None:
    """The nodes of the cluster count, not those that the device usually has."""
    mesh = autopar.Cluster("8x4 h100", link_between="infiniband_200").mesh((32,))
    assert mesh.links == ("nvlink4*4+infiniband_200",)


@pytest.mark.parametrize("text", ["h100", "0x8 h100", "4x8", "4x8h100x", "x8 h100", "4x8 tpu", "-1x8 h100", ""])
def test_bad_text(text: str) -> None:
    """A text that is no cluster is refused with what to write."""
    with pytest.raises(MeshError, match=r"write nodes x devices|no device profile"):
        autopar.Cluster(text)


def test_sizes_must_fit() -> None:
    """A logical mesh uses all devices."""
    with pytest.raises(MeshError, match="has 32 devices"):
        autopar.Cluster("4x8 h100").mesh((4, 4))


def test_unknown_link() -> None:
    """An unknown link is refused at once."""
    with pytest.raises(MeshError, match="no link profile"):
        autopar.Cluster("4x8 h100", link_between="string")
