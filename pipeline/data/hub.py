"""Rows of a data set on the Hugging Face hub, streamed: nothing but what is read is fetched."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from datasets import disable_progress_bars, load_dataset
from datasets.exceptions import DatasetsError
from httpx2 import HTTPError

from pipeline.data.rows import Row
from pipeline.data.sources import HubData
from pipeline.errors import DataError


def hub_rows(data: HubData, load: Callable[..., Iterable[dict[str, Any]]] = load_dataset) -> Iterator[Row]:
    """The rows of a split, numbered from 1.

    Raises:
        DataError: there is no such data set, revision or split, or the hub cannot be reached.
    """
    disable_progress_bars()
    try:
        # without the prefix, a folder of that name that lies here would be read in its place
        rows = load(f"hf://datasets/{data.repository}", revision=data.revision, split=data.split, streaming=True)
        for number, content in enumerate(rows, 1):
            yield Row(number, content)
    except (OSError, ValueError, DatasetsError, HTTPError) as error:
        raise DataError(
            f"{data.name} cannot be read: {' '.join(str(error).split())[:300]}. Check name, revision and split; "
            "where the hub cannot be reached, bring the files themselves and name their folder."
        ) from error
