"""Codecs: lossy encodings of float32 arrays for sending. Pure: arrays in, arrays out."""

from potluck._core.codecs import kernels as kernels
from potluck._core.codecs.codec import Codec, check_dtype
from potluck._core.codecs.registry import NAMES, codec_of, digest_of, register

__all__ = ["NAMES", "Codec", "check_dtype", "codec_of", "digest_of", "register"]
