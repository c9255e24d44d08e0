"""Compressors: gradients in fewer bytes, with error feedback. Pure: arrays in, arrays out."""

from potluck.compressors.compressed import Compressed
from potluck.compressors.compressor import (
    GradientCompressor,
    quantize_gradients,
    sparsify_gradients,
)
from potluck.compressors.encoded import BF16, FP16, Int
from potluck.compressors.powersgd import PowerSGD
from potluck.compressors.random import Random
from potluck.compressors.strategy import Strategy
from potluck.compressors.topk import TopK

__all__ = [
    "BF16",
    "FP16",
    "Compressed",
    "GradientCompressor",
    "Int",
    "PowerSGD",
    "Random",
    "Strategy",
    "TopK",
    "quantize_gradients",
    "sparsify_gradients",
]
