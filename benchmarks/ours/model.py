"""Where the embedded model lies as a plain 16-bit folder; made the first time."""

from typing import Any

from benchmarks.probe import Figures, serve
from pipeline.base_model import locate


def run(_: dict[str, Any]) -> Figures:
    """The folder's path."""
    return {"folder": str(locate("embedded").resolve())}


if __name__ == "__main__":
    serve(run, ("transformers",))
