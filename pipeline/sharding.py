"""FSDP: processes hold the frozen weights of the blocks together, and fetch a block's when a pass comes to it.

Adapters, embeddings, the last norm and the output matrix stay whole in each process: log-probabilities read the output matrix
directly, and adapters are small. Their gradients are added up by `ranks`; their optimizer's moments are divided, see `update`.

This is torch's `fully_shard`, which accelerate's FSDP 2 calls too. Accelerate would divide embeddings and output matrix besides,
and wants the optimizer for itself: docs/several-processes.md.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from pipeline import processes


def shard(decoder: nn.Module, device: torch.device) -> None:
    """Leaves this process its part of each weight of the blocks, adapters excepted. Once is enough."""
    if isinstance(decoder, FSDPModule):
        return
    mesh = init_device_mesh(device.type, (processes.count(),))
    layers = next(module for module in decoder.children() if isinstance(module, nn.ModuleList))
    adapters = {parameter for key, parameter in layers.named_parameters() if ".lora_" in key}
    for block in layers:
        fully_shard(block, mesh=mesh, ignored_params=adapters)
    # of the rest it divides nothing: it is the root, which knows what block comes next
    left = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=left)


@contextlib.contextmanager
def whole(decoder: nn.Module) -> Iterator[None]:
    """Every weight is there, for sampling: a token's pass is over sooner than weights could be fetched for it."""
    blocks = [module for module in decoder.modules() if isinstance(module, FSDPModule) and module is not decoder]
    for block in blocks:
        block.set_reshard_after_forward(False)
        block.unshard()
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True)
            block.reshard()
