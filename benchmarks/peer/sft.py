"""Plain PEFT fine-tuning: the model's own loss with labels, AdamW on the adapter, gradients summed up over micro-batches."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer.common import PACKAGES, adapted_model, prepare
from benchmarks.probe import Figures, serve
from benchmarks.work import Work, prompt_ids


def run(request: dict[str, Any]) -> Figures:
    """Seconds of each measured optimizer step over `work.rows` rows of prompt and answer; labels at the answer."""
    work, microbatch = Work(**request["work"]), request["microbatch"]
    prepare(work)
    model = adapted_model(Path(request["model"]), work).train()
    optimizer = torch.optim.AdamW([weights for weights in model.parameters() if weights.requires_grad], lr=1e-5)
    whole_rows = replace(work, prompt=work.row_tokens)
    seconds = []
    for iteration in range(work.warmup + work.iterations):
        ids_BT = torch.tensor(prompt_ids(whole_rows, iteration))
        labels_BT = ids_BT.clone()
        labels_BT[:, : work.prompt] = -100
        started = time.perf_counter()
        for ids, labels in zip(ids_BT.split(microbatch), labels_BT.split(microbatch), strict=True):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
            (loss * len(ids) / work.rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[work.warmup :]}


if __name__ == "__main__":
    serve(run, PACKAGES)
