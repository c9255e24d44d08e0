"""The replica of a PyTorch training: a model, its optimizers and other objects with a state."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.checkpoint.state import State, fingerprint
from potluck.errors import CheckpointError
from potluck.torch.amp import GradScaler
from potluck.torch.compression import Compression, tell_dropped
from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.outer import OuterStrategy, check_strategy, hyperparameters, set_hyperparameters
from potluck.torch.structure import arithmetic, device_of, overwrite, structure_of

_log = logging.getLogger(__name__)


class TorchReplica:
    """A ``training.replica.Replica``. ``also`` are objects with state_dict and load_state_dict;
    TypeError for others. With an ``outer`` strategy the global parameters are what it holds.

    With ``own_frozen`` each rank has read the frozen parameters itself: they are no part of the
    state. Their hashes are part of the structure, which ranks compare, and of the state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Any],
        outer: OuterStrategy | None = None,
        *,
        own_frozen: bool = False,
    ) -> None:
        for name, each in also.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    f"also[{name!r}] is a {type(each).__name__}: it needs state_dict and "
                    "load_state_dict"
                )
        self._model = model
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._optimizers = list(optimizers)
        self._also = dict(also)
        self._outer = outer
        self._buffers: list[Tensor] = []
        self._random: State = None
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._frozen: dict[str, str] = {}
        """By name the hash of each frozen parameter that is no part of the state."""
        if own_frozen:
            self._frozen = {
                name: fingerprint(parameter)
                for name, parameter in model.named_parameters()
                if name not in self._trained
            }
        device = device_of(model)
        is_cuda = device.type == "cuda"
        self.device = torch.cuda.get_device_name(device) if is_cuda else str(device)
        self.arithmetic = arithmetic(device)

    @property
    def _compression(self) -> Compression | None:
        """The residuals of the model's gradients."""
        return None if self._ddp is None else self._ddp.compression

    def capture(self) -> State:
        outer, model = self._outer, self._model_state()
        state = {
            "model": model if outer is None else outer.global_state(model),
            "outer": None if outer is None else outer.capture(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "also": {name: each.state_dict() for name, each in self._also.items()},
        }
        if self._compression is not None:
            state["compression"] = self._compression.capture_shared()
        if self._frozen:
            state["frozen"] = self._frozen
        return state

    def fixed(self) -> State:
        return {"model": self._model_state()}

    def _model_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._model.state_dict()
        if not self._frozen:
            return state
        # By identity: tied parameters have several names, and what a quantized layer adds to its
        # state belongs to its frozen weight.
        sent = {
            *(id(each) for each in self._model.parameters() if each.requires_grad),
            *(id(each) for each in self._model.buffers()),
        }
        kept = self._model.state_dict(keep_vars=True)
        return {name: each for name, each in state.items() if id(kept[name]) in sent}

    def structure(self) -> dict[str, str]:
        if self._ddp is not None:
            found = self._ddp.structure()
        else:
            found = structure_of(self._model, self._trained)
        return found | {f"the values of {name}": text for name, text in self._frozen.items()}

    def restore(self, state: State) -> None:
        self._check(state)
        self._model.load_state_dict(state["model"], strict=not self._frozen)
        for optimizer, each in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        for name, each in self._also.items():
            each.load_state_dict(state["also"][name])
        if self._outer is not None:
            self._outer.restore(state["outer"])
        if self._compression is not None:
            self._compression.restore_shared(state.get("compression", {}))

    def _check(self, state: State) -> None:
        """CheckpointError that names the difference, before anything is changed."""
        check_strategy(state["outer"], None if self._outer is None else self._outer.capture())
        num_optimizers = len(state["optimizers"])
        if num_optimizers != len(self._optimizers):
            raise CheckpointError(
                f"the state has {num_optimizers} optimizers, this training has "
                f"{len(self._optimizers)}"
            )
        if state["also"].keys() != self._also.keys():
            raise CheckpointError(
                f"the state holds also={sorted(state['also'])}, this training has "
                f"also={sorted(self._also)}"
            )
        theirs_frozen = state.get("frozen", {})
        if theirs_frozen != self._frozen:
            names = self._frozen.keys() | theirs_frozen.keys()
            name = min(n for n in names if self._frozen.get(n) != theirs_frozen.get(n))
            raise CheckpointError(
                f"the state belongs to another base model: the frozen {name!r} has other values"
                if name in self._frozen and name in theirs_frozen
                else f"the state and this training differ in whether the frozen {name!r} is a "
                "part of it: give both the same frozen="
            )
        own = self._model_state()
        different = [
            name
            for name in own.keys() | state["model"].keys()
            if _shape(own.get(name)) != _shape(state["model"].get(name))
        ]
        if different:
            name = min(different)
            theirs, mine = _shape(state["model"].get(name)), _shape(own.get(name))
            raise CheckpointError(
                f"the state belongs to another model: {name!r} is {theirs} in the state, {mine} in "
                "this model"
            )

    def capture_own(self) -> State:
        state = capture_random()
        if self._compression is not None:
            state["residuals"] = self._compression.capture()
        if self._outer is not None:
            state["residuals"] = self._outer.capture_residuals()
        return state

    def restore_own(self, states: Sequence[State]) -> None:
        restore_random(states[0])
        residuals = [each.get("residuals", {}) for each in states]
        kept: set[str] = set()
        if self._compression is not None:
            kept = self._compression.restore(residuals)
        if self._outer is not None:
            kept = self._outer.restore_residuals(residuals)
        tell_dropped(residuals, kept)
        if kept and (owing := sum(map(bool, residuals))) > 1:
            _log.warning("this rank goes on with the residuals of %d ranks, added up", owing)

    def fingerprint(self) -> str:
        """Of the parameters, and in data parallelism of the learning rates and their kin: a script
        that sets these by itself may set them unlike on a joining worker."""
        if self._outer is not None:
            return self._outer.fingerprint()
        return fingerprint([list(self._compared().values()), hyperparameters(self._optimizers)])

    def _compared(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._model.named_parameters() if n not in self._frozen}

    def shared(self) -> State:
        return {
            "parameters": {name: each.detach() for name, each in self._compared().items()},
            "hyperparameters": hyperparameters(self._optimizers),
        }

    @torch.no_grad()
    def take_shared(self, state: State) -> None:
        for name, parameter in self._compared().items():
            parameter.copy_(state["parameters"][name])
        set_hyperparameters(self._optimizers, state["hyperparameters"])

    def parameter_hash(self) -> str:
        return fingerprint(list(self._compared().values()))

    def remember(self, step: int) -> None:
        if self._compression is not None:
            self._compression.begin(step)
            scalers = [each for each in self._also.values() if isinstance(each, GradScaler)]
            self._compression.scale = scalers[0].factor if scalers else 1.0
        self._buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        self._random = capture_random()

    @torch.no_grad()
    def undo(self) -> None:
        if self._compression is not None:
            self._compression.undo()
        for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
            if not torch.equal(buffer, before):  # the script may hold a graph that has saved it
                overwrite(buffer, before)
        for parameter in self._model.parameters():
            parameter.grad = None
        restore_random(self._random)

    def weigh(self, weight: float) -> None:
        if self._ddp is not None:
            self._ddp.weight = weight
            self._ddp.reduces = self._outer is None
            self._ddp.synchronized = True  # the loop has made the states of all ranks equal


def parameter_hash(model: nn.Module) -> str:
    """Hex SHA-256 of the model's parameters: their dtypes, shapes and bits."""
    return fingerprint(list(model.parameters()))


def _shape(value: Any) -> str:
    """The shape of a value in words; it must be equal for the value to be loaded."""
    if value is None:
        return "missing"
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def capture_random() -> dict[str, Any]:
    """The states of torch's generators (CPU, and CUDA if in use) and of the global generators of
    Python and NumPy."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random(state: State) -> None:
    """Set the generators to ``state``, a result of ``capture_random``.

    CUDA generators stay as they are if this machine has another number of devices.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    cuda = state.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
