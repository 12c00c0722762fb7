#!/bin/sh
# `dvc repro` on a machine that may be taken away: what earlier machines have finished is fetched, and each stage is sent off as
# soon as it is done. Needs a default DVC remote (docs/scale.md).
set -eu
# The stage and DVC get the signal too. This shell outlives them, because the container ends with it.
trap : INT TERM
dvc pull --run-cache --allow-missing
for stage in $(dvc stage list --name-only); do
    dvc repro "$stage"
    dvc push --run-cache "$stage"
done
