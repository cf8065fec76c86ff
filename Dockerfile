# syntax=docker/dockerfile:1
# What a flow run needs elsewhere: docs/cluster.md. No data and no weights are in it.
#   docker build --build-arg TORCH_INDEX=ADDRESS -t minimind .      (ADDRESS: the index of PyTorch's CPU builds)
FROM python:3.11-slim

# tini passes signals on and buries what orphans leave: a trainer must hear of a cancelled run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 minimind \
    && install --directory --owner minimind /workspace /workspace/.runs
WORKDIR /workspace

# Packages come from where pip's own configuration says. What is given here counts for pip alone; TORCH_INDEX is looked at, too.
ARG PIP_INDEX_URL
ARG TORCH_INDEX
# Further packages, such as "dvc-s3" for a DVC remote in S3.
ARG EXTRA_PACKAGES=""
COPY requirements.lock /tmp/requirements.lock
RUN grep '^torch==' /tmp/requirements.lock > /tmp/torch.lock \
    && pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -r /tmp/torch.lock \
    && pip install --no-cache-dir -r /tmp/requirements.lock ${EXTRA_PACKAGES}

COPY --chown=minimind . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .
ENV DO_NOT_TRACK=1
USER minimind
ENTRYPOINT ["tini", "--"]
CMD ["dvc", "status"]
