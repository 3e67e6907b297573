# thermocline's server for the CPU: docker build -t thermocline . (docs/install.md). A base image is pinned by its digest:
# --build-arg BASE=debian@sha256:... The steps are tested without a container program: make image.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++-12 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN /source/scripts/wheel.sh python3 /source /wheel
RUN python3 -m venv /opt/thermocline \
 && /opt/thermocline/bin/pip install --no-cache-dir --require-hashes --no-deps -r /source/hashes/run.txt \
 && /opt/thermocline/bin/pip install --no-cache-dir --no-index --no-deps /wheel/thermocline_moe-*.whl \
 && /opt/thermocline/bin/pip uninstall --yes cmake ninja nanobind scikit-build-core

FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 7717 --create-home thermocline \
 && install --directory --owner thermocline /models
COPY --from=build /opt/thermocline /opt/thermocline
# Downloaded models, and what was measured of them, stay in the volume.
ENV PATH=/opt/thermocline/bin:/usr/local/bin:/usr/bin:/bin \
    HF_HOME=/models/hub \
    THERMOCLINE_CACHE=/models/cache \
    THERMOCLINE_HOST=0.0.0.0
USER thermocline
WORKDIR /models
VOLUME /models
EXPOSE 7717
# Large models take minutes to open; until then the server says 503.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
  CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:7717/health', timeout=4)"]
ENTRYPOINT ["thermocline"]
CMD ["serve"]
