"""Train a Hugging Face GPT-2 on real English text, split over all processes, and compare with one process.

    torchrun --nproc-per-node 4 examples/train_gpt.py
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh 2,2 --memory 30MB --save-plan plan.json

The text is the help that every Python ships (``pydoc_data.topics``), one token a byte. The script runs unchanged on
GPUs. At the end the first process trains the same model alone, with the same seeds (dropout is on), and every loss must
agree.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.elastic.multiprocessing.errors import record

import autopar

TOLERANCE = 1e-4
"""How far a loss may be, relatively, from the one of a single process."""


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train GPT-2 over all processes, and check it against one process.")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--mesh", default=None, help="axis sizes, such as 2,2; by default one axis over all processes")
    parser.add_argument("--memory", default=None, help="budget for each process, such as 30MB; by default none")
    parser.add_argument("--save-plan", type=Path, default=None, help="write the plan to this file")
    parser.add_argument("--plan", type=Path, default=None, help="use the plan of this file instead of solving")
    return parser.parse_args()


def make_model() -> torch.nn.Module:
    """Return a small GPT-2, dropout as in the default configuration."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def batches(options: argparse.Namespace, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the global batch of every step: ``[batch, length]`` bytes of the text."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1234)
    for _ in range(options.steps):
        starts = torch.randint(0, len(data) - options.length, (options.batch,), generator=generator)
        yield torch.stack([data[start : start + options.length] for start in starts.tolist()]).long().to(device)


def train(
    model: torch.nn.Module, options: argparse.Namespace, device: torch.device, show: Callable[[float, float], Any]
) -> list[float]:
    """Train with AdamW and return the loss of every step; the same code for one process and for many."""
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for ids in batches(options, device):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        show(losses[-1], ids.numel() / (time.perf_counter() - start))
    return losses


def progress_bar(title: str, console: Console, enabled: bool) -> tuple[Any, Callable[[int], Callable[..., None]]]:
    """Return a progress bar (a context) and a function from the number of steps to its callback."""
    if not enabled:
        return nullcontext(), lambda _: lambda loss, speed: None
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console)

    def callback(steps: int) -> Callable[..., None]:
        task = bar.add_task("", total=steps)
        return lambda loss, speed: bar.update(
            task, advance=1, description=f"loss {loss:.4f}  {speed:,.0f} tokens/s", refresh=True
        )

    return bar, callback


@record
def main() -> int:
    """Train, compare, and return 0 when every loss agrees."""
    options = parse_arguments()
    transformers.logging.set_verbosity_error()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    console = Console(soft_wrap=True)
    sizes = tuple(int(size) for size in options.mesh.split(",")) if options.mesh else (world,)

    original = make_model().to(device)
    alone = copy.deepcopy(original) if rank == 0 else None
    ids = next(batches(options, device))
    example = {"input_ids": ids, "labels": ids}
    try:
        model = autopar.parallelize(original, sizes, example_kwargs=example, memory=options.memory, plan=options.plan)
    except autopar.AutoparError as error:  # raised on every process
        if rank == 0:
            console.print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
        return 2
    if rank == 0:
        console.print(str(model.plan), markup=False, highlight=False)
        if options.save_plan:
            model.plan.save(options.save_plan)
    bar, callback = progress_bar(f"{world} processes", console, rank == 0)
    with bar:
        losses = train(model, options, device, callback(options.steps))

    agree = torch.ones(1, device=device)
    if alone is not None:
        bar, callback = progress_bar("1 process  ", console, True)
        with bar:
            expected = train(alone, options, device, callback(options.steps))
        worst = max(abs(ours - one) / abs(one) for ours, one in zip(losses, expected, strict=True))
        console.print(
            f"loss after {options.steps} steps: {losses[-1]:.6f} on {world} processes, {expected[-1]:.6f} on one; "
            f"largest relative difference of any step: {worst:.2e} (allowed: {TOLERANCE:.0e})"
        )
        agree.fill_(float(worst <= TOLERANCE))
    dist.broadcast(agree, 0)
    dist.destroy_process_group()
    return 0 if agree.item() == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
