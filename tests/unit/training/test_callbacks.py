"""Callbacks: optional methods, and mistakes that name their object."""

from __future__ import annotations

import pytest

from potluck.errors import CallbackError, PeerLost
from potluck.training.callbacks import EVENTS, Callbacks


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        self.seen.append((epoch, loss))


def test_only_the_methods_that_are_there_are_called() -> None:
    recorder = Recorder()
    callbacks = Callbacks([recorder])
    for event in EVENTS:
        callbacks.call(event, 1, 0.5)
    assert recorder.seen == [(1, 0.5)]


def test_a_misspelt_method_is_found_before_the_training() -> None:
    class Misspelt:
        def on_epoch_ended(self, epoch: int, loss: float) -> None: ...

    with pytest.raises(TypeError, match="Misspelt has on_epoch_ended; a callback has methods"):
        Callbacks([Misspelt()])
    with pytest.raises(TypeError, match=r"can\'t be called as f\(epoch, loss\)"):
        Callbacks([lambda: None])


def test_what_a_callback_raises_names_it_and_keeps_its_cause() -> None:
    class Broken:
        def on_step_end(self, step: int, loss: float) -> None:
            raise KeyError("accuracy")

    with pytest.raises(CallbackError, match=r"Broken.on_step_end raised KeyError: 'accuracy'") as e:
        Callbacks([Recorder(), Broken()]).call("on_step_end", 3, 0.1)
    assert isinstance(e.value.__cause__, KeyError)


def test_a_lost_peer_in_a_callback_stays_a_lost_peer() -> None:
    class Communicating:
        def on_step_end(self, step: int, loss: float) -> None:
            raise PeerLost("rank 1 is gone")

    with pytest.raises(PeerLost):
        Callbacks([Communicating()]).call("on_step_end", 3, 0.1)


def test_a_class_or_a_single_object_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Recorder is a class.*pass Recorder\(\)"):
        Callbacks([Recorder])
    with pytest.raises(TypeError, match="callbacks is a Recorder; pass a list"):
        Callbacks(Recorder())  # type: ignore[arg-type]
