"""Every random number of the pipeline: seeded once, or keyed by what it is for, never by call order."""

import hashlib
import random
import struct
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from pipeline.params.runtime import RuntimeParams


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed of its own for each use of one seed."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def prepare_torch(seed: int, runtime: RuntimeParams) -> None:
    """Fixes the number of threads, asks for deterministic algorithms, and seeds everything."""
    torch.set_num_threads(runtime.threads)
    torch.use_deterministic_algorithms(runtime.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # only a debugging aid, and it costs time
    seed_generators(seed)


def seed_generators(seed: int) -> None:
    """All that libraries draw from: adapters' and heads' first weights, dropout."""
    transformers.set_seed(seed)


class RandomStates:
    """The states of all generators that a library, or a user's reward function, may draw from."""

    def state_dict(self) -> dict[str, Any]:
        """Taken now."""
        name, keys, *position = np.random.get_state()
        return {
            "python": random.getstate(),
            "numpy": [name, keys.tolist(), *position],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draws what would have been drawn next."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *position = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *position))
        torch.set_rng_state(state["torch"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])


def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """A random order of `size` rows, a function of seed and epoch alone."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(size, generator=generator)


def uniforms(seed: int, step: int, keys: list[tuple[int, int]], token: int) -> Tensor:
    """One number in [0, 1) for each (prompt key, sample index): the noise of token `token` in step `step`; float64, [len(keys)].

    A hash of what the number is for: chunking, compaction, ranks and resume do not change which noise a row gets.
    """
    numbers = []
    for prompt, sample in keys:
        digest = hashlib.blake2b(struct.pack("<qqqqq", seed, step, prompt, sample, token), digest_size=8).digest()
        numbers.append((int.from_bytes(digest, "little") >> 11) / 2**53)
    return torch.tensor(numbers, dtype=torch.float64)
