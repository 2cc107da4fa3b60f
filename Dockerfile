# maxdiffusion in a container: the wheel, in a slim image without compilers.
#   docker build -t maxdiffusion .                                  CPUs
#   docker build -t maxdiffusion --build-arg HARDWARE=cuda13 .      NVIDIA GPUs, whose driver is the host's: --gpus all
#   docker build -t maxdiffusion --build-arg HARDWARE=tpu .         TPUs
#   docker run --rm -v "$PWD:/work" maxdiffusion train configs/quickstart.yml
ARG BASE=debian:12-slim
FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip git && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN git config --global --add safe.directory /source && cd /source && ./run package wheel --out /packages

FROM ${BASE}
ARG HARDWARE=cpu
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv ca-certificates && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /packages /packages
RUN case "$HARDWARE" in \
      cpu) extra= ;; \
      cuda13|tpu) extra="[$HARDWARE]" ;; \
      *) echo "HARDWARE is '$HARDWARE'; expected cpu, cuda13 or tpu" >&2; exit 1 ;; \
    esac && \
    python3 -m venv /opt/maxdiffusion && \
    /opt/maxdiffusion/bin/pip install --no-cache-dir "$(ls /packages/*.whl)$extra" && \
    ln -s /opt/maxdiffusion/bin/maxdiffusion /usr/local/bin/maxdiffusion && rm -rf /packages
WORKDIR /work
ENTRYPOINT ["maxdiffusion"]
