"""Codecs of your own: element by element, inside an ``all_reduce`` (``codec="name"``)."""

from potluck._core.codecs import Codec, register

__all__ = ["Codec", "register"]
