"""docs/tutorial.md's blocks: each ```python is run, in order and in one namespace, and what it prints is the ```text after it.

`make docs` writes what they print, and the plot of the clip.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import torch

from pipeline.objectives.online import clipped_surrogate

matplotlib.use("Agg")  # draws into files
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<text>.*?)```", re.DOTALL)


def blocks() -> Iterator[tuple[re.Match[str], str]]:
    """Each block, and what it prints now."""
    namespace: dict[str, object] = {}
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], str(PAGE), "exec"), namespace)
        yield block, printed.getvalue()


def write_page() -> None:
    """Puts what is printed under each block."""
    text = PAGE.read_text(encoding="utf-8")
    for block, printed in list(blocks()):
        text = text.replace(block[0], f"```python\n{block['code']}```\n\n```text\n{printed}```")
    PAGE.write_text(text, encoding="utf-8")


def draw_clip(file: Path) -> None:
    """The loss of one token over its ratio, by the function that trains, for either sign of the advantage."""
    ratios = torch.linspace(0.4, 1.6, 121)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharex=True, layout="constrained")
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        terms = [
            clipped_surrogate(r.log().view(1, 1), torch.zeros(1, 1), torch.full((1, 1), advantage), torch.ones(1, 1, dtype=torch.bool), 0.2)
            for r in ratios
        ]  # fmt: skip
        axis.plot(ratios, [float(term.loss_sum) for term in terms], label="PPO's loss")
        axis.plot(ratios, -advantage * ratios, linestyle=":", label="without the clip")
        axis.axvspan(0.8, 1.2, alpha=0.12)
        axis.set(title=f"advantage {advantage:+.0f}", xlabel="ratio: new probability / old", ylabel="loss")
        axis.legend()
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    write_page()
    draw_clip(ROOT / "docs/clip.png")
