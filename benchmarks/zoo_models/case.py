"""A case of the zoo: a model with example inputs, built when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCAB = 4, 8, 64
"""Rows, tokens a row and words of the text models. On eight ranks the rows alone do not go round."""

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model with its positional and keyword inputs."""

Inputs = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        name: unique in the zoo.
        kind: what the table groups by (``text decoder``, ``vision``, ...).
        package: where it comes from; ``""`` for models written here.
        build: returns the model with its inputs.
        training: forward and backward with dropout as configured, or the forward alone in eval mode.
    """

    name: str
    kind: str
    package: str
    build: Callable[[], Built]
    training: bool = True


REGISTRY: dict[str, Case] = {}


def enter(case: Case) -> None:
    """Put a case into the registry."""
    if case.name in REGISTRY:
        raise ValueError(f"two cases are called {case.name}")
    REGISTRY[case.name] = case


def hugging_face(
    name: str,
    kind: str,
    model: str,
    config: Mapping[str, Any] | Callable[[Any], Any],
    inputs: Inputs,
    *,
    config_class: str = "",
    training: bool = True,
) -> None:
    """Enter a model of transformers, built from its config with random weights.

    Args:
        model: name of the model class.
        config: arguments of the config class, or a function of the library that returns a config.
        inputs: keyword inputs.
        config_class: by default that of the model's config.
    """

    def build() -> Built:
        if importlib.util.find_spec("torchvision") is not None:
            vision_package()  # transformers imports it where it is there
        library = importlib.import_module("transformers")
        kind_of_model = getattr(library, model)
        if callable(config):
            made = config(library)
        else:
            made = (getattr(library, config_class) if config_class else kind_of_model.config_class)(**config)
        return kind_of_model(made), (), inputs()

    enter(Case(name, kind, "transformers", build, training))


def written(
    kind: str, training: bool = True, package: str = ""
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Enter a function that builds a model under its own name."""

    def note(build: Callable[[], Built]) -> Callable[[], Built]:
        enter(Case(build.__name__, kind, package, build, training))
        return build

    return note


def vision_package() -> Any:
    """Return torchvision; its few compiled ops are declared without a kernel where they can't be loaded.

    The wheel of a package index may be built against another torch (CUDA or not). The models here use none of them.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise ImportError("torchvision is not installed; pip install 'autopar[zoo]'")
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # its compiled part has not been loaded, so its ops are unknown
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        return importlib.import_module("torchvision")


_LIBRARIES: list[Any] = []


def words(vocab: int = VOCAB, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Return random token numbers; none is below 4, which many models keep for padding and marks."""
    return torch.randint(4, vocab, (batch, length))


def text(*, labels: bool = True, vocab: int = VOCAB, length: int = LENGTH, **more: Any) -> Inputs:
    """Return the inputs of a language model: tokens, and the same as labels."""

    def make() -> dict[str, Any]:
        tokens = words(vocab, length=length)
        return {"input_ids": tokens, **({"labels": tokens.clone()} if labels else {}), **more}

    return make


def masked_text(**more: Any) -> Inputs:
    """Return tokens with an attention mask of rows of different lengths, and labels."""

    def make() -> dict[str, Any]:
        tokens, mask = words(), torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[0, 5:] = 0
        mask[2, 6:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone(), **more}

    return make


def pictures(
    side: int = 32, *, classes: int | None = 10, channels: int = 3, batch: int = BATCH, name: str = "pixel_values"
) -> Inputs:
    """Return random pictures with a class each."""

    def make() -> dict[str, Any]:
        made: dict[str, Any] = {name: torch.randn(batch, channels, side, side)}
        if classes is not None:
            made["labels"] = torch.randint(0, classes, (batch,))
        return made

    return make
