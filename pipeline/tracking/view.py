"""What MLflow's table of runs shows at `?viewStateShareKey=compare`: the pipeline runs alone, with the figures that they are compared by.

It is what MLflow's own button *Share* writes: a tag of the experiment. MLflow does not document its form; where a version of
its pages does not know it, they show their usual table.
"""

import json

PIPELINE_KEY = "pipeline.key"  # the tag that pipeline runs have, and their stages' runs have not
KEY = "compare"
FIGURES = (
    *("summary.win_rate_judge", "summary.win_rate_judge_low", "summary.win_rate_judge_high"),
    *("summary.win_rate_reward", "summary.kl", "summary.length", "cost.seconds"),
)
COLUMNS = [*(f"metrics.`{name}`" for name in FIGURES), "tags.`verdict.policy`"]
COMPARISON = (
    f"mlflow.sharedViewState.{KEY}",
    json.dumps(
        {
            "searchFilter": f"tags.`{PIPELINE_KEY}` LIKE '%'",
            "selectedColumns": COLUMNS,
            "columnOrder": COLUMNS,
            # pixels: MLflow's own cut the names
            "columnWidths": {column: 40 + 6 * len(column.partition(".")[2]) for column in COLUMNS},
        }
    ),
)
"""The tag's name and value."""
