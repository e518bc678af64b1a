"""Run the passes over a lowered program, on the graphs of several ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

from autopar.errors import OptionError

from .bucket_collectives import bucket_collectives
from .drop_unused import drop_unused
from .edits import apply_edits
from .issue_early import issue_early
from .join_axes import join_axes
from .merge_equal import merge_equal
from .reduce_in_place import reduce_in_place
from .setting import Pass, Setting
from .wait_late import wait_late
from .write_in_place import write_in_place

PASSES: tuple[Pass, ...] = (
    merge_equal,
    drop_unused,
    join_axes,
    bucket_collectives,
    issue_early,
    wait_late,
    reduce_in_place,
    write_in_place,
)
"""Every pass, in the order in which they run; each is called by its name."""

NAMES: tuple[str, ...] = tuple(each.__name__ for each in PASSES)


def improve(
    joints: Sequence[fx.GraphModule],
    setting: Setting,
    disable: Collection[str] = (),
    watch: Callable[[str, fx.GraphModule], None] | None = None,
) -> None:
    """Change lowered joint graphs in place; their results stay the same.

    Each pass decides on the first graph alone, and what it decides is done to all: so every rank runs the same
    sequence of collectives, however unequal their pieces are.

    Args:
        joints: the graph of the first rank of the mesh, then those of others.
        setting: what is known besides.
        disable: names of passes that are left out.
        watch: called with the name of each pass and each graph that it changed.

    Raises:
        OptionError: a name is unknown.
    """
    check_names(disable)
    for each in PASSES:
        if each.__name__ in disable:
            continue
        apply_edits([joint.graph for joint in joints], each(joints[0], setting))
        if watch is not None:
            for joint in joints:
                watch(each.__name__, joint)


def check_names(names: Collection[str]) -> None:
    """Check that names are those of passes.

    Raises:
        OptionError: one is not.
    """
    for name in names:
        if name not in NAMES:
            raise OptionError(f"disable= names no pass by {name!r}; there are {', '.join(NAMES)}")
