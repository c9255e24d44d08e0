"""What the compiler and the linker put into the extension against memory errors. ELF only."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from potluck._core import native

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not native.available, reason="needs the native core on Linux"
)

PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_FLAGS, DT_FLAGS_1 = 30, 0x6FFFFFFB
BIND_NOW, NOW, EXECUTABLE = 8, 1, 1


class Elf:
    """The parts of a 64-bit little-endian ELF file that tell of its protection."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (table,) = struct.unpack_from("<Q", self.data, 0x20)
        size, count = struct.unpack_from("<HH", self.data, 0x36)
        self.segments = {}
        for index in range(count):
            kind, flags, offset, _, _, nbytes = struct.unpack_from(
                "<IIQQQQ", self.data, table + index * size
            )
            self.segments[kind] = (flags, offset, nbytes)

    @property
    def dynamic(self) -> dict[int, int]:
        _, offset, nbytes = self.segments[PT_DYNAMIC]
        return dict(struct.iter_unpack("<qQ", self.data[offset : offset + nbytes]))


@pytest.fixture(scope="module")
def core() -> Elf:
    elf = Elf(Path(native.core.__file__))
    if b"__asan_init" in elf.data:
        pytest.skip("a build for the sanitizers, which check more")
    return elf


def test_addresses_of_functions_are_read_only_once_the_core_is_loaded(core: Elf) -> None:
    """Full RELRO: all are looked up at once, then their table is protected."""
    assert PT_GNU_RELRO in core.segments
    flags = core.dynamic
    assert flags.get(DT_FLAGS, 0) & BIND_NOW or flags.get(DT_FLAGS_1, 0) & NOW


def test_its_stack_holds_no_code(core: Elf) -> None:
    assert not core.segments[PT_GNU_STACK][0] & EXECUTABLE


def test_frames_end_with_a_guard_that_is_checked_on_return(core: Elf) -> None:
    assert b"\0__stack_chk_fail\0" in core.data


def test_copies_of_a_known_bound_check_it(core: Elf) -> None:
    assert b"_chk\0" in core.data.replace(b"__stack_chk_fail", b"")
