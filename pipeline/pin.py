"""`make pin`: every hub revision in params.yaml that can move becomes the commit that it is now.

Only the revision is rewritten; comments stay. A data set's name may stand in a .hf file, which is rewritten then.
"""

import re
import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pipeline.errors import BaseModelError, UserError
from pipeline.files import write_text
from pipeline.lineage import COMMIT, flattened, unpinned
from pipeline.params.section import PARAMS_FILE, read_params
from pipeline.progress import console

SPEC = re.compile(r"hf://(?P<repository>[^@\s]+)@(?P<revision>[^:\s]+)(?P<split>:\S+)?")


def pin(file: Path = Path(PARAMS_FILE)) -> list[str]:
    """Writes the commits; what was pinned, one line each.

    Raises:
        BaseModelError: the hub does not have a revision, or cannot be reached; what came before it is pinned.
    """
    params = dict(flattened(read_params(file)))
    told = []
    for key in unpinned(read_params(file)):
        place = Path(params[key]) if params[key].endswith(".hf") else file
        text = place.read_text(encoding="utf-8")
        named = SPEC.search(text if place != file else params[key])
        commit = commit_of(key, named["repository"], named["revision"], is_data=key.startswith("data."))
        pinned = f"hf://{named['repository']}@{commit}{named['split'] or ''}"
        write_text(place, text.replace(named[0], pinned))
        told.append(f"{key}: {named['repository']} {named['revision']} -> {commit} ({place})")
    return told


def commit_of(key: str, repository: str, revision: str, is_data: bool) -> str:
    """The commit that a branch or tag of the hub is at now.

    Raises:
        BaseModelError: the hub does not say.
    """
    ask = HfApi().dataset_info if is_data else HfApi().model_info
    try:
        found = ask(repository, revision=revision).sha
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise BaseModelError(
            f"{key} names {repository} at {revision} but the hub did not say which commit that is: "
            f"{' '.join(str(error).split())[:200]}; check name, revision, network and HF_TOKEN."
        ) from error
    if found is None or not COMMIT.search(f"@{found}"):
        raise BaseModelError(f"{key}: the hub gives {found!r} as the commit of {repository} at {revision}.")
    return found


def main() -> None:
    """Pins and says what."""
    try:
        told = pin()
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)
    for line in told or ["Every hub revision in params.yaml is a commit already."]:
        console.print(line, markup=False)


if __name__ == "__main__":
    main()
