"""potluck: train on the machines you already own.

The public names are attributes of this module, imported at their first use: ``import potluck``
itself imports no torch, no network code and no cryptography.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from potluck._core.version import VERSION

if TYPE_CHECKING:
    from potluck import checkpoint as checkpoint
    from potluck import codecs as codecs
    from potluck import collectives as collectives
    from potluck import compressors as compressors
    from potluck import data as data
    from potluck import errors as errors
    from potluck import estimators as estimators
    from potluck import federated as federated
    from potluck import graphs as graphs
    from potluck import jax as jax
    from potluck import mlx as mlx
    from potluck import parameter_server as parameter_server
    from potluck import services as services
    from potluck import testing as testing
    from potluck import torch as torch
    from potluck import training as training
    from potluck._core.backends.discovery import AutoDiscoveryBackend as AutoDiscoveryBackend
    from potluck._core.backends.inprocess import InProcessBackend as InProcessBackend
    from potluck._core.backends.local import LocalBackend as LocalBackend
    from potluck._core.backends.mpi import MpiBackend as MpiBackend
    from potluck._core.backends.ring import RingBackend as RingBackend
    from potluck._core.backends.torchdist import GlooBackend as GlooBackend
    from potluck._core.backends.torchdist import NcclBackend as NcclBackend
    from potluck._core.context import Commit as Commit
    from potluck._core.context import DistributedContext as DistributedContext
    from potluck._core.context import Message as Message
    from potluck._core.context import all_reduce_mean as all_reduce_mean
    from potluck._core.context import all_reduce_sum as all_reduce_sum
    from potluck._core.context import init as init
    from potluck._core.engine.work import Work as Work
    from potluck._core.types import Group as Group
    from potluck._core.types import Member as Member
    from potluck._core.types import ReduceOp as ReduceOp
    from potluck.compressors import BF16 as BF16
    from potluck.compressors import FP16 as FP16
    from potluck.compressors import Compressed as Compressed
    from potluck.compressors import GradientCompressor as GradientCompressor
    from potluck.compressors import PowerSGD as PowerSGD
    from potluck.compressors import Quantize as Quantize
    from potluck.compressors import RandomK as RandomK
    from potluck.compressors import TopK as TopK
    from potluck.compressors import quantize_gradients as quantize_gradients
    from potluck.compressors import sparsify_gradients as sparsify_gradients
    from potluck.estimators.trainers import DistributedKMeansTrainer as DistributedKMeansTrainer
    from potluck.estimators.trainers import (
        DistributedRandomForestTrainer as DistributedRandomForestTrainer,
    )
    from potluck.parameter_server import AggregationMethod as AggregationMethod
    from potluck.parameter_server import ParameterServer as ParameterServer
    from potluck.services import Call as Call
    from potluck.services import NodeServices as NodeServices
    from potluck.services import Remote as Remote
    from potluck.services import service as service
    from potluck.torch.trainer import DistributedNeuralNetTrainer as DistributedNeuralNetTrainer
    from potluck.training.balance import balance_workload as balance_workload
    from potluck.training.partition import DataPartitioner as DataPartitioner
    from potluck.training.trainer import DistributedTrainer as DistributedTrainer
    from potluck.training.trainer import TrainingStrategy as TrainingStrategy
    from potluck.training.work_queue import WorkQueue as WorkQueue

__version__ = VERSION

_HOMES = {
    "potluck._core.backends.discovery": ("AutoDiscoveryBackend",),
    "potluck._core.backends.inprocess": ("InProcessBackend",),
    "potluck._core.backends.local": ("LocalBackend",),
    "potluck._core.backends.mpi": ("MpiBackend",),
    "potluck._core.backends.ring": ("RingBackend",),
    "potluck._core.backends.torchdist": ("GlooBackend", "NcclBackend"),
    "potluck.compressors": (
        *("BF16", "FP16", "Compressed", "GradientCompressor", "Quantize", "PowerSGD", "RandomK"),
        *("TopK", "quantize_gradients", "sparsify_gradients"),
    ),
    "potluck._core.context": (
        *("Commit", "DistributedContext", "Message", "all_reduce_mean", "all_reduce_sum", "init"),
    ),
    "potluck._core.engine.work": ("Work",),
    "potluck.estimators.trainers": (
        *("DistributedKMeansTrainer", "DistributedRandomForestTrainer"),
    ),
    "potluck.parameter_server": ("AggregationMethod", "ParameterServer"),
    "potluck.torch.trainer": ("DistributedNeuralNetTrainer",),
    "potluck.training.balance": ("balance_workload",),
    "potluck.training.partition": ("DataPartitioner",),
    "potluck.training.trainer": ("DistributedTrainer", "TrainingStrategy"),
    "potluck.training.work_queue": ("WorkQueue",),
    "potluck.services": ("Call", "NodeServices", "Remote", "service"),
    "potluck._core.types": ("Group", "Member", "ReduceOp"),
}
"""The module of each public name. The block above is for type checkers; a test compares the two."""

_MODULES = (
    "checkpoint",
    "codecs",
    "collectives",
    "compressors",
    "data",
    "errors",
    "estimators",
    "federated",
    "graphs",
    "jax",
    "mlx",
    "parameter_server",
    "services",
    "testing",
    "torch",
    "training",
)
"""Submodules that are attributes without an import statement of the script. Not in ``__all__``: a
star import would replace torch by potluck.torch."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"potluck.{name}")
    else:
        # Not `from potluck import hints`, which would call this function again.
        hints = importlib.import_module("potluck._core.hints")
        raise hints.of_module(__name__, name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext potluck`` calls in a notebook: the cell magic ``%%potluck``."""
    notebook = importlib.import_module("potluck.cli.notebook")
    shell.register_magic_function(notebook.CellMagic(shell).run, "cell", "potluck")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
