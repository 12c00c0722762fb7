"""What glibc's heap takes for the tensors that torch asks of it: more than their bytes, as holes are left where they were.

A model of malloc(3) as torch's CPU allocator uses it, through posix_memalign: best fit, neighbours joined, large requests mapped
apart, with the limit between the two moving up as mapped memory is given back (mallopt(3), M_MMAP_THRESHOLD). A request searches for room to
align it too, so that a hole of just its size is passed over (glibc's bug 14581, mended in 2.38).
"""

from bisect import bisect_left, insort

ALIGNING = 64 + 32 + 16  # bytes: alignment, the smallest chunk, a chunk's head
MAPPED_FROM, MAPPED_FROM_AT_MOST = 128 * 1024, 32 * 1024**2


class Heap:
    """Addresses and bytes; `size` is what the process holds."""

    def __init__(self) -> None:
        self._top = 0
        self._mapped = 0
        self._mapped_from = MAPPED_FROM
        self._holes: list[tuple[int, int]] = []  # (size, address)
        self._hole_at: dict[int, int] = {}  # address -> size
        self._hole_before: dict[int, int] = {}  # end -> address

    @property
    def size(self) -> int:
        """Bytes."""
        return self._top + self._mapped

    def take(self, size: int) -> int | None:
        """The address of `size` bytes; None where they are mapped apart."""
        if size >= self._mapped_from:
            self._mapped += size
            return None
        place = bisect_left(self._holes, (size + ALIGNING, 0))
        if place == len(self._holes):  # also where a hole at the top could be extended: it begins there
            start = self._top
            if start in self._hole_before:
                start = self._hole_before[start]
                self._remove(start)
            self._top = start + size
            return start
        hole, start = self._holes[place]
        self._remove(start)
        self._add(start + size, hole - size)
        return start

    def give(self, address: int | None, size: int) -> None:
        """Back what `take` gave."""
        if address is None:
            self._mapped -= size
            if size <= MAPPED_FROM_AT_MOST:
                self._mapped_from = max(self._mapped_from, size)
            return
        if address in self._hole_before:
            before = self._hole_before[address]
            size += self._remove(before)
            address = before
        if address + size in self._hole_at:
            size += self._remove(address + size)
        self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        insort(self._holes, (size, address))
        self._hole_at[address] = size
        self._hole_before[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._hole_at.pop(address)
        del self._hole_before[address + size]
        del self._holes[bisect_left(self._holes, (size, address))]
        return size
