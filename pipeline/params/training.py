"""What the supervised stages share: epochs, batches, learning rates."""

from pipeline.params.section import Section, param


class TrainingParams(Section):
    """One pass structure and one optimizer."""

    epochs: int = param("passes over the data", 2, ge=1)
    batch_size: int = param("rows (or pairs) per optimizer step", 16, ge=1)
    lr: float = param("peak learning rate of the adapter", 5e-4, gt=0, le=1)
    warmup_share: float = param("share of the steps in which the learning rate rises to its peak", 0.1, ge=0, lt=1)
    max_grad_norm: float = param("gradients are scaled down to this global norm", 1.0, gt=0)
