"""One file per stage. `python -m stages.NAME` is what DVC runs."""

import pipeline  # noqa: F401  (before a stage imports torch: it sets OMP_WAIT_POLICY)
