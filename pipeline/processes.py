"""How many processes work on this stage, and which of them this is. What they say to each other: pipeline/ranks.py.

Without torch: a program that only writes files does not load it.
"""

import os

TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable of processes that torchrun has started
RANK, COUNT = "RANK", "WORLD_SIZE"  # clusters set them too: they mean something where torchrun has started the process


def rank() -> int:
    """This process's number, from 0."""
    return int(os.environ[RANK]) if TORCHRUN in os.environ else 0


def count() -> int:
    """How many processes there are."""
    return int(os.environ[COUNT]) if TORCHRUN in os.environ else 1


def is_main() -> bool:
    """Whether this is the process that writes and speaks for all."""
    return rank() == 0
