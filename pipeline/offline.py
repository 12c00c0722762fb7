"""The offline loop: SFT, reward model and DPO; only the objective and the batches differ."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

from pipeline.batch import Batch
from pipeline.out_of_memory import MICROBATCH
from pipeline.recovery import NO_RECOVERY, NoRecovery, Recovery
from pipeline.update import Objective, Optimizer, accumulate


def train_offline(
    model: Callable[[Batch], Any],
    batches: Iterable[Batch],
    optimizer: Optimizer,
    objective: Objective,
    microbatch_tokens: int,
    dropout: bool,
    log: Callable[[int, dict[str, float]], None],
    recovery: Recovery | NoRecovery = NO_RECOVERY,
) -> None:
    """One optimizer step per batch, from the first one that no process before has taken."""
    start = recovery.resume(optimizer=optimizer)
    with model.backbone.training(dropout=dropout):
        for step, batch in enumerate(islice(batches, start, None), start):
            assert batch.num_terms > 0, "a batch has nothing to learn from"
            gradients = partial(accumulate, model, batch, objective)
            stats = MICROBATCH.fit(microbatch_tokens, gradients, undo=optimizer.zero_grad)
            stats |= optimizer.step(stats["loss"])
            log(step, stats)
            recovery.reached(f"step {step + 1}")
