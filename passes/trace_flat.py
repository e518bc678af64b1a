"""Views that merge the leading dims, followed so that nothing after them has to work on the merged dim.

Many models write ``x.view(-1, width)``, multiply, and view back. The merged dim would hide batch and sequence from
everything that splits the graph, so the product is taken on the tensor before the view; viewing back then finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_VIEWS = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})
_CASTS = frozenset({Tensor.to, Tensor.float, Tensor.long, Tensor.contiguous, Tensor.type_as})


class FlatView(NamedTuple):
    """``flat`` is ``whole`` with its leading ``merged`` dims as one; the versions tell whether one was written to."""

    flat: Tensor
    whole: Tensor
    merged: int
    versions: tuple[int, int]


class FlatViews:
    """The flat views of one trace, by the tensor that the model holds."""

    def __init__(self) -> None:
        self._views: dict[int, FlatView] = {}

    def whole(self, flat: Any) -> tuple[Tensor, int] | None:
        """Return the tensor that ``flat`` is a view of and how many leading dims it merges; None if it is none."""
        view = self._views.get(id(flat))
        if view is None or view.versions != (view.flat._version, view.whole._version):
            return None
        return view.whole, view.merged

    def flatten(self, whole: Tensor, merged: int) -> Tensor:
        """Return ``whole`` with its leading ``merged`` dims as one, and remember it."""
        flat = whole.reshape(-1, *whole.shape[merged:])
        self.remember(flat, whole, merged)
        return flat

    def remember(self, flat: Tensor, whole: Tensor, merged: int) -> None:
        """Note that ``flat`` is ``whole`` with its leading dims merged."""
        self._views[id(flat)] = FlatView(flat, whole, merged, (flat._version, whole._version))

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return what the model shall get for ``result = func(*args, **kwargs)``; notes or undoes flat views."""
        if not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
            return result
        source = args[0]
        if func in _VIEWS:
            return self._follow_view(source, result)
        if func in _CASTS and result is not source:
            known = self.whole(source)
            if known is not None:
                whole = func(known[0], *args[1:], **kwargs)
                if whole.dim() == known[0].dim():
                    self.remember(result, whole, known[1])
        return result

    def _follow_view(self, source: Tensor, result: Tensor) -> Tensor:
        known = self.whole(source)
        if known is not None and known[0].shape == result.shape and _share_memory(known[0], source):
            return known[0]  # else a write into one would not be one into the other
        merged = _merged_dims(source.shape, result.shape)
        if merged:
            kept = (*merged, *result.shape[1:])
            self.remember(result, source if kept == source.shape else source.reshape(kept), len(merged))
        return result


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _merged_dims(source: Sequence[int], result: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of ``source`` that become the first one of ``result``, whatever becomes of the others.

    The last of them may be the outer part of a dim, as the batch is of batch and heads. There are none where the first
    dim stays.

    >>> _merged_dims((12, 4, 8, 16), (48, 128)), _merged_dims((12, 32, 16), (48, 128)), _merged_dims((12, 4), (12, 4))
    ((12, 4), (12, 4), ())
    """
    if not result or 0 in result or len(source) < 2 or source[0] == result[0]:
        return ()
    whole, dims = source[0], [source[0]]
    for size in source[1:]:
        left, rest = divmod(result[0], whole)
        if rest or left <= 1:
            return ()
        if size % left == 0:
            return (*dims, left)
        whole, dims = whole * size, [*dims, size]
    return ()
