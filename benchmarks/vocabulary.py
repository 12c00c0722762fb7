"""Memory of log-probabilities, forward and backward, as the vocabulary and the number of tokens grow.

python -m benchmarks.vocabulary        (about a minute; memory does not mind what else runs)

Each line is a process of its own. The head and the states are there before; what is measured comes on top of them.
`plain` is log_softmax over all logits at once, as most trainers have it.
"""

import pipeline  # noqa: F401  # isort: skip  (before torch: it says how its threads wait)

import torch
from torch import Tensor

from benchmarks.measuring import as_line, in_fresh_process, measured
from pipeline.tensors import token_logprobs

HIDDEN, CHUNK = 256, 1024
VOCABULARIES = (32_768, 65_536, 131_072, 262_144)
TOKENS = (1024, 2048, 4096, 8192)


def plain(hidden_NH: Tensor, head_VH: Tensor, ids_N: Tensor) -> Tensor:
    """As one would write it."""
    logits_NV = (hidden_NH @ head_VH.T).float()
    return torch.log_softmax(logits_NV, -1).gather(1, ids_N[:, None]).squeeze(1)


def log_prob_pass(kind: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """Seconds and peak MiB of one forward and backward in bfloat16."""
    torch.manual_seed(0)
    head_VH = torch.randn(vocabulary, HIDDEN, dtype=torch.bfloat16)
    hidden_NH = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    ids_N = torch.randint(0, vocabulary, (tokens,))
    token_logprobs(hidden_NH[:1], head_VH[:64], ids_N[:1] % 64, 1.0, 1).sum().backward()  # libraries are loaded now

    def work() -> None:
        hidden_NH.grad = None
        if kind == "plain":
            plain(hidden_NH, head_VH, ids_N).sum().backward()
        else:
            token_logprobs(hidden_NH, head_VH, ids_N, 1.0, CHUNK).sum().backward()

    return measured(work, repeats=2)


def main() -> None:
    """Prints a line for each size."""
    sizes = [("ours", vocabulary, 1024) for vocabulary in VOCABULARIES]
    sizes += [("ours", VOCABULARIES[0], tokens) for tokens in TOKENS[1:]]
    sizes += [("plain", VOCABULARIES[0], 1024), ("plain", VOCABULARIES[-1], 1024), ("plain", VOCABULARIES[0], 4096)]
    for kind, vocabulary, tokens in sizes:
        found = in_fresh_process(log_prob_pass, kind, vocabulary, tokens)
        print(as_line(kind=kind, vocabulary=vocabulary, tokens=tokens, **found), flush=True)


if __name__ == "__main__":
    main()
