"""Callbacks: objects whose methods the loop calls between steps, or functions for the end of
epochs.

    class Report:
        def on_epoch_end(self, epoch: int, loss: float) -> None:
            print(f"epoch {epoch}: loss {loss:.4f}")

    ElasticLoop(..., callbacks=[Report(), lambda epoch, loss: print(epoch, loss)])

Every method is optional; a function counts as ``on_epoch_end``. Every rank calls its own objects.
``on_step_end`` is called once for a committed step, also if the step was run again, on each rank
that was a member. A callback may call ``job.average`` and ``job.save`` if all ranks' callbacks do;
if a peer is lost meanwhile, the call raises and the callback ends early. Any other exception of a
callback ends the training on all ranks with a CallbackError that names the callback.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from potluck.errors import CallbackError, GroupError

EVENTS = {
    "on_train_begin": "(job): before the first step; job is the loop",
    "on_step_end": "(step, loss): after a commit; the number of committed steps, the global loss "
    "or NaN",
    "on_epoch_end": "(epoch, loss): after an epoch's last commit; the mean loss of its samples",
    "on_group_change": "(world_size): after a worker was lost or joined",
    "on_train_end": "(job): after every sample of every epoch is committed",
}
"""The methods that a callback may have, with their arguments."""


class Callbacks:
    """The callbacks of one loop, called in the order of ``objects``. TypeError for an object that
    is no callback."""

    def __init__(self, objects: Sequence[object]) -> None:
        if not isinstance(objects, Sequence):
            raise TypeError(f"callbacks is a {type(objects).__name__}; pass a list of objects")
        for each in objects:
            if isinstance(each, type):
                raise TypeError(
                    f"{each.__name__} is a class; a callback is an object: pass {each.__name__}()"
                )
            names = [name for name in dir(each) if name.startswith("on_")]
            if callable(each) and not names:
                _check_takes_epoch_and_loss(each)
                continue
            unknown = [name for name in names if name not in EVENTS]
            if unknown or not names:
                wrong = f"has {unknown[0]}" if unknown else "has none of them"
                raise TypeError(
                    f"{type(each).__name__} {wrong}; a callback has methods named "
                    f"{', '.join(EVENTS)}"
                )
        self._objects = list(objects)

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method ``event`` of every object that has it.

        An exception of a callback becomes a CallbackError that names callback and exception. A
        GroupError is raised as it is: the loop forms the next group.
        """
        for each in self._objects:
            if hasattr(each, event):
                function, name = getattr(each, event), f"{type(each).__name__}.{event}"
            elif callable(each) and event == "on_epoch_end":
                function, name = each, _name_of(each)
            else:
                continue
            try:
                function(*arguments)
            except GroupError:
                raise
            except Exception as error:
                raise CallbackError(f"{name} raised {type(error).__name__}: {error}") from error


def _check_takes_epoch_and_loss(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(0, 0.0)
    except TypeError as error:
        raise TypeError(
            f"{_name_of(function)} can't be called as f(epoch, loss), as functions in callbacks "
            f"are at the end of each epoch: {error}"
        ) from None
    except ValueError:
        pass  # a function in C without a signature


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
