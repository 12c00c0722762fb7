"""What pipeline/__init__.py sets before torch is loaded."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

GROWTH = """
import pipeline
import torch
from test_kernels import heap_in_use

torch.set_num_threads(1)
weight = torch.randn(320, 64).bfloat16()


def multiply(rows):
    for n in rows:
        torch.randn(n, 64).bfloat16() @ weight.T


multiply(range(10, 110))
before = heap_in_use()
multiply(range(110, 410))
print(heap_in_use() - before)
"""


class Mallinfo2(ctypes.Structure):
    """mallinfo(3): `uordblks` is the heap in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def heap_in_use() -> int:
    """Bytes; glibc's."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    return mallinfo2().uordblks


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap is asked by glibc's mallinfo2 (2.33)")
def test_products_of_all_shapes_do_not_pile_up() -> None:
    """300 shapes more; with the libraries' own limit of 1,024 kernels the heap grew by 166 MB here, with ours by 0.3."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        cwd=ROOT,
        env={"PATH": str(Path(sys.executable).parent), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20e6
