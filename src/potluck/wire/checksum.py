"""CRC-32C (Castagnoli; RFC 3720, appendix B.4) in Python, with the same results as
``native/core/kernels/checksum.cpp``."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 256


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """The checksum of ``data``, continued from ``before``, the checksum of preceding data.

    The register is linear in its input, so large buffers are split into lanes, which NumPy
    processes in parallel, and the lanes' registers are combined pair by pair.
    """
    octets = np.frombuffer(data, np.uint8)
    state: NDArray[np.uint32] = np.array([before ^ 0xFFFFFFFF], np.uint32)
    if octets.size >= 16 * _LANE_BYTES:
        num_lanes = 1 << (octets.size // _LANE_BYTES).bit_length() - 1
        length = octets.size // num_lanes
        lanes = octets[: length * num_lanes].reshape(num_lanes, length).T.copy()
        registers = np.zeros(num_lanes, np.uint32)
        registers[:1] = state
        for column in lanes:
            registers = _step(registers, column)
        shift = _shift_by(length)
        while registers.size > 1:
            registers = _apply(shift, registers[0::2]) ^ registers[1::2]
            shift = [_apply(shift, image) for image in shift]
        state = registers
        octets = octets[length * num_lanes :]
    value = int(state[0])
    for octet in octets.tolist():
        value = _STEPS[(value ^ octet) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _make_table() -> NDArray[np.uint32]:
    table: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ ((table & np.uint32(1)) * np.uint32(_POLYNOMIAL))
    return table


_TABLE = _make_table()
_STEPS = _TABLE.tolist()


def _step(registers: NDArray[np.uint32], octets: NDArray[np.uint8]) -> NDArray[np.uint32]:
    stepped: NDArray[np.uint32] = _TABLE[(registers ^ octets) & 0xFF] ^ (registers >> 8)
    return stepped


Shift = list[NDArray[np.uint32]]
"""The linear map of a register by ``n`` zero bytes: a table for each of the register's four
bytes."""

_IDENTITY: Shift = [np.arange(256, dtype=np.uint32) << np.uint32(8 * k) for k in range(4)]


@lru_cache(maxsize=64)
def _shift_by(length: int) -> Shift:
    """The shift by ``length`` zero bytes, by squaring: a shift by 2n is twice a shift by n."""
    power = [_step(image, np.zeros(256, np.uint8)) for image in _IDENTITY]
    shift = _IDENTITY
    while length:
        if length & 1:
            shift = [_apply(power, image) for image in shift]
        power = [_apply(power, image) for image in power]
        length >>= 1
    return shift


def _apply(shift: Shift, registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    shifted: NDArray[np.uint32] = (
        shift[0][registers & 0xFF]
        ^ shift[1][(registers >> 8) & 0xFF]
        ^ shift[2][(registers >> 16) & 0xFF]
        ^ shift[3][registers >> 24]
    )
    return shifted
