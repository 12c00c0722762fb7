#!/bin/sh
# `dvc repro`, or the stages that are named, on a machine that may be taken away. What earlier machines have finished is fetched, and
# each stage is sent off as soon as it is done: its data to DVC's default remote, dvc.lock and the small tables, as always, to Git:
# the branch $RESULTS of origin. docs/scale.md says what that needs.
set -eu
: "${RESULTS:=results}"
# In MLflow the machines that work on one branch are one pipeline run, and not one each.
export SOLO_RLHF_CHECKOUT="${SOLO_RLHF_CHECKOUT:-$RESULTS}"
# Stage and DVC get a signal too. This shell outlives them, because the container ends with it.
trap : INT TERM

if git fetch --quiet origin "$RESULTS"; then
    git ls-tree --name-only FETCH_HEAD dvc.lock metrics plots reports | xargs git checkout --quiet FETCH_HEAD --
fi
dvc pull --run-cache --allow-missing
for stage in ${*:-$(dvc stage list --name-only)}; do
    dvc repro "$stage"
    # the data first: Git is to name nothing that is not there
    dvc push --run-cache --with-deps "$stage"
    git add --all
    git diff --cached --quiet || git -c user.name=solo-rlhf -c user.email=solo-rlhf@localhost commit --quiet --message "Results of $stage"
    git push --quiet --force origin "HEAD:refs/heads/$RESULTS"
done
