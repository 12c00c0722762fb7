"""Recording a function of tensors once as a CUDA graph and replaying it: hundreds of kernels for one launch.

Not verified on a GPU yet: docs/performance.md says what is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TensorFunction = Callable[..., Tensor]
"""Tensors -> one tensor, on fixed shapes and without a look at values."""


def recorded(function: TensorFunction, *examples: Tensor) -> TensorFunction:
    """`function` as a graph. It is called with `examples` twice; that must do no more than calling it once.

    What it reads or writes beside its arguments must stay where it lies. Its result is overwritten by the next call.
    """
    inputs = [example.clone() for example in examples]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries allocate on the first call, which a graph cannot record
        function(*inputs)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*inputs)

    def replay(*values: Tensor) -> Tensor:
        for mine, value in zip(inputs, values, strict=True):
            mine.copy_(value)
        graph.replay()
        return output

    return replay
