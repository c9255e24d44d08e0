"""What ``time_to_loss.py`` trains: a CNN on scikit-learn's digits, and a small GPT on the source of
Python's standard library, byte by byte. Real data that every installation has; nothing is loaded.

A task's data set is one pass over ``steps * batch_size`` samples, so that no epoch ends inside a
round. Sample ``i`` is a function of ``i`` and of the seed alone: all workers, torch's DDP and a
training on one machine see the same samples in the same steps.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.training.shard_order import GOLDEN, hashed

Pair = tuple[Tensor, Tensor]

FOLDS = 5
"""The digits of a fifth of the images are held out, another fifth for each seed."""
CONTEXT = 32
"""Bytes that the GPT sees."""
_HELD_OUT_FILES = 10
"""Each tenth file of the standard library is held out."""


@dataclass(frozen=True, slots=True)
class Task:
    """One model and its data. ``batch_size`` is that of all workers together, ``steps`` are those
    of a whole training, and ``rate`` is the learning rate after the first 20, which then falls."""

    name: str
    title: str
    batch_size: int
    steps: int
    rate: float
    target: float
    """The validation loss that a training is to reach, in nats for each sample (or byte)."""
    make: Callable[[], nn.Module]
    split: Callable[[int], tuple[Sampler, Pair]]
    """By seed: how samples are made, and what is held out."""

    def model(self, seed: int) -> nn.Module:
        """New parameters, equal on all ranks."""
        torch.manual_seed(seed)
        return self.make()

    def data(self, seed: int) -> Samples:
        return Samples(self.split(seed)[0], seed, self.steps * self.batch_size)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.01, fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Twenty steps of warm-up, then half a cosine down to nothing."""

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / self.steps)) / 2

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    @torch.no_grad()
    def validate(self, model: nn.Module, seed: int) -> tuple[float, float]:
        """The mean loss of what is held out, and the part that is predicted right."""
        inputs, labels = self.split(seed)[1]
        was_training = model.training
        model.eval()
        logits = torch.cat([model(part) for part in torch.split(inputs, 64)]).flatten(0, -2)
        model.train(was_training)
        labels = labels.flatten()
        right = (logits.argmax(dim=-1) == labels).double().mean().item()
        return F.cross_entropy(logits, labels).item(), right


Sampler = Callable[[NDArray[np.int64], int], Pair]
"""The inputs and labels of these samples, of a data set with this seed."""


class Samples(torch.utils.data.Dataset[Any]):
    """``length`` samples, made a batch at a time. With ``collate=whole`` a batch stays one."""

    def __init__(self, make: Sampler, seed: int, length: int) -> None:
        self._make, self._seed, self._length = make, seed, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Pair:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        return self._make(np.asarray(indices, np.int64), self._seed)


def whole(batch: Any) -> Any:
    """What ``Samples`` makes is a batch already."""
    return batch


# Digits.


class DigitsCNN(nn.Module):
    """Two convolutions over 8 x 8 pixels, and two dense layers, which hold most parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.dense = nn.Linear(32 * 64, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x)))).flatten(1)
        logits: Tensor = self.last(F.relu(self.dense(x)))
        return logits


@functools.cache
def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The images, from 0 to 1, with a border of one pixel, in a fixed random order."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images = (x[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1))), y[order].astype(np.int64)


@functools.cache
def _split_digits(seed: int) -> tuple[Sampler, Pair]:
    images, labels = _digits()
    held_out = np.arange(len(images)) % FOLDS == seed % FOLDS
    mine, own = images[~held_out], labels[~held_out]
    windows = np.lib.stride_tricks.sliding_window_view(mine, (8, 8), axis=(2, 3))

    def make(indices: NDArray[np.int64], _: int) -> Pair:
        """Each image in all nine places to which a border of one pixel lets it move, in turn."""
        epoch, image = np.divmod(indices, len(mine))
        place = (image + epoch) % 9
        x = np.ascontiguousarray(windows[image, :, place // 3, place % 3])
        return torch.from_numpy(x), torch.from_numpy(own[image])

    inner = np.ascontiguousarray(images[held_out, :, 1:9, 1:9])
    return make, (torch.from_numpy(inner), torch.from_numpy(labels[held_out]))


# Text.


class Block(nn.Module):
    """Attention and a perceptron, each on what a layer norm gives, added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        after: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return after


class GPT(nn.Module):
    """A decoder over bytes (Radford et al. 2019)."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bytes(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


@functools.cache
def _texts() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The modules of the standard library, joined: those to train on, and those held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    joined = [
        b"\n".join(
            each.read_bytes()
            for number, each in enumerate(files)
            if (number % _HELD_OUT_FILES == 0) is held_out
        )
        for held_out in (False, True)
    ]
    trained, held_out = (np.frombuffer(each, np.uint8) for each in joined)
    return trained, held_out


@functools.cache
def _split_text(seed: int) -> tuple[Sampler, Pair]:
    text, held_out = _texts()

    def windows(text: NDArray[np.uint8], starts: NDArray[np.int64]) -> Pair:
        rows = torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def make(indices: NDArray[np.int64], seed: int) -> Pair:
        """A window of the text; where it begins is a hash of its number."""
        numbers = hashed((indices.astype(np.uint64) + np.uint64(seed << 32)) * GOLDEN)
        starts = numbers % np.uint64(len(text) - CONTEXT)
        return windows(text, starts.astype(np.int64))

    starts = np.linspace(0, len(held_out) - CONTEXT - 1, 256).astype(np.int64)
    return make, windows(held_out, starts)


TASKS = {
    task.name: task
    for task in (
        Task("digits", "digits, CNN", 32, 1000, 1e-3, 0.10, lambda: DigitsCNN(768), _split_digits),
        Task("gpt", "text, GPT", 4, 2000, 1e-3, 2.4, lambda: GPT(256, 3, 4), _split_text),
    )
}

SOAK = Task("soak", "text, GPT", 16, 10_000_000, 5e-4, 0.0, lambda: GPT(128, 2, 4), _split_text)
"""460,000 parameters and a training that does not end."""
