"""Compressors: gradients in fewer bytes, with error feedback. Pure: arrays in, arrays out."""

from potluck.compressors.base import Compressor
from potluck.compressors.encoded import BF16, FP16, Quantize
from potluck.compressors.gradient_compressor import (
    Compressed,
    GradientCompressor,
    quantize_gradients,
    sparsify_gradients,
)
from potluck.compressors.powersgd import PowerSGD
from potluck.compressors.randomk import RandomK
from potluck.compressors.topk import TopK

__all__ = [
    "BF16",
    "FP16",
    "Compressed",
    "Compressor",
    "GradientCompressor",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "TopK",
    "quantize_gradients",
    "sparsify_gradients",
]
