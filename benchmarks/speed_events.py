"""What the profiler saw of a step: how much of the collectives' time compute hid, Python's time, the most bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]

WAITS = ("wait_tensor", "c10d::", "_c10d_functional::")
COMPUTE = ("aten::", "autopar::")
COLLECTIVES = ("gloo:", "nccl:", "nccldevkernel")


@dataclass(frozen=True)
class Event:
    """One thing that the profiler saw.

    Attributes:
        name: of the op, the collective, or ``[memory]``.
        thread: it ran on; the main thread's is the first.
        start_s, end_s: when.
        num_bytes: that were allocated, or freed below zero.
    """

    name: str
    thread: int
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass(frozen=True)
class Seen:
    """What a run of some steps showed.

    Attributes:
        collective_s: seconds in which a collective was under way, overlapping ones counted once.
        hidden_s: those of them in which the main thread computed.
        python_s: seconds in which the main thread ran no op and waited for none.
        peak_bytes: the most bytes that were alive beyond those at the start.
    """

    collective_s: float
    hidden_s: float
    python_s: float
    peak_bytes: int

    @property
    def hidden_fraction(self) -> float | None:
        """The part of the collectives' time that compute hid; None without collectives."""
        return self.hidden_s / self.collective_s if self.collective_s else None


def watch(run: Callable[[], Any], trace: Path | None = None) -> list[Event]:
    """Run something under the profiler and return what it saw; write a Chrome trace if asked."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return [
        Event(e.name(), e.start_thread_id(), e.start_ns() / 1e9, (e.start_ns() + e.duration_ns()) / 1e9, e.nbytes())
        for e in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    ]


def read_events(events: Iterable[Event]) -> Seen:
    """Return what the events of one process say.

    A collective counts from when it is handed over to when it is complete. It is hidden while the thread that handed it
    over runs an op that is neither a wait nor a collective.
    """
    events = sorted(events, key=lambda event: event.start_s)
    ops = [event for event in events if event.name != "[memory]"]
    main = ops[0].thread if ops else 0
    collectives = merge((e.start_s, e.end_s) for e in ops if e.name.lower().startswith(COLLECTIVES))
    mine = [e for e in ops if e.thread == main and not e.name.lower().startswith(COLLECTIVES)]
    waiting = merge((e.start_s, e.end_s) for e in mine if e.name.startswith(WAITS))
    computing = subtract(merge((e.start_s, e.end_s) for e in mine if e.name.startswith(COMPUTE)), waiting)
    busy = merge((e.start_s, e.end_s) for e in mine)
    begin, end = (mine[0].start_s, max(e.end_s for e in mine)) if mine else (0.0, 0.0)
    return Seen(
        collective_s=length(collectives),
        hidden_s=length(overlap(collectives, computing)),
        python_s=(end - begin) - length(busy),
        peak_bytes=_peak(e for e in events if e.name == "[memory]"),
    )


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, with those that touch made one.

    >>> merge([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def overlap(first: list[Span], second: list[Span]) -> list[Span]:
    """Return what is in both of two merged lists.

    >>> overlap([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    out, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            out.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return out


def subtract(first: list[Span], second: list[Span]) -> list[Span]:
    """Return what is in the first of two merged lists only.

    >>> subtract([(0, 5)], [(1, 2), (4, 6)])
    [(0, 1), (2, 4)]
    """
    gaps = [-float("inf"), *(edge for span in second for edge in span), float("inf")]
    return overlap(first, list(zip(gaps[::2], gaps[1::2])))


def length(spans: Iterable[Span]) -> float:
    """Return the seconds of merged spans."""
    return sum(end - start for start, end in spans)


def _peak(memory: Iterable[Event]) -> int:
    now = most = 0
    for event in memory:
        now += event.num_bytes
        most = max(most, now)
    return most
