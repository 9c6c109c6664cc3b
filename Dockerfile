# The gateway, and the mock engines: one image with the wheel and what it needs at run time,
# the clients for Redis and S3, the exporter for OpenTelemetry and PyJWT included.
#
#   docker build -t sluice .
#   docker run -p 8080:8080 -v ./sluice.yaml:/etc/sluice/sluice.yaml:ro sluice
#
# The configuration must listen on 0.0.0.0 (`server.host`): 127.0.0.1 is the container's own.

ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
# What decides is compiled (docs/adr/0007); the compiler stays in this stage.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV HATCH_BUILD_HOOK_ENABLE_MYPYC=true
WORKDIR /src
# The environment is made without pip: nothing can be installed into it later. What compiles reads
# it for the types, and needs no bytecode. The locks are complete: nothing has to be resolved.
COPY requirements/build.txt requirements/runtime.txt ./requirements/
RUN python -m venv --without-pip /opt/sluice \
    && pip --python /opt/sluice/bin/python install --no-deps --require-hashes -r requirements/runtime.txt \
    && pip install --no-deps --no-compile --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY compressor ./compressor
COPY predictor ./predictor
COPY gateway ./gateway
COPY planner ./planner
COPY simulator ./simulator
COPY controller ./controller
COPY sluice ./sluice
RUN PYTHONPATH=$(echo /opt/sluice/lib/python*/site-packages) \
        pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/sluice/bin/python install --no-deps /wheels/sluice_gateway-*.whl

FROM ${PYTHON_IMAGE}
# The release names it; pyproject.toml is where it stands.
ARG VERSION=unreleased
LABEL org.opencontainers.image.title="sluice" \
      org.opencontainers.image.description="An OpenAI-compatible gateway for fleets of LLM engines" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/sluice/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SLUICE_HEALTH_PORT=8080
# Numeric, so that an orchestrator can see that it is not root. The working directory is where
# relative paths of the configuration (the request log) start.
RUN groupadd --system --gid 10001 sluice \
    && useradd --system --uid 10001 --gid sluice --no-create-home \
        --home-dir /var/lib/sluice --shell /usr/sbin/nologin sluice \
    && install -d -o sluice -g sluice -m 0750 /var/lib/sluice \
    && install -d -m 0755 /etc/sluice
COPY --from=build /opt/sluice /opt/sluice
WORKDIR /var/lib/sluice
USER 10001:10001
EXPOSE 8080
# SIGTERM drains: give the container longer than `server.drain_timeout_s` to stop.
STOPSIGNAL SIGTERM
# /health is the process; whether it can serve is /ready, which a load balancer should ask.
# Without urllib, which would obey a proxy from the environment.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-IS", "-c", "import os, sys; from http.client import HTTPConnection; c = HTTPConnection('127.0.0.1', int(os.environ['SLUICE_HEALTH_PORT']), timeout=2); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["sluice"]
CMD ["serve", "-c", "/etc/sluice/sluice.yaml"]
