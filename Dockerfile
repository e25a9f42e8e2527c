# Everything is installed from the lock files, by hash. `docker build .` makes the relay,
# `docker build --target pipeline .` what runs the pipeline: drivers and the nodes of a Spark cluster alike.
# A digest behind the tag (python:3.11-slim@sha256:…) makes every build begin with the same image.
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY locks/build.txt ./locks/
RUN python -m venv /opt/build \
 && /opt/build/bin/python -m pip install --quiet --require-hashes -r locks/build.txt
COPY client ./client
COPY relayd ./relayd
COPY pipeline ./pipeline
COPY migrations ./migrations
RUN PATH=/opt/build/bin:$PATH /opt/build/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels ./client ./relayd ./pipeline

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY locks/image.txt /locks/
RUN python -m venv /opt/relayd \
 && /opt/relayd/bin/python -m pip install --quiet --require-hashes -r /locks/image.txt
COPY --from=wheel /wheels /wheels
RUN /opt/relayd/bin/python -m pip install --quiet --no-deps /wheels/strata_sdk-*.whl /wheels/strata_pipeline-*.whl /wheels/relayd-*.whl \
 && /opt/relayd/bin/python -m compileall -q /opt/relayd/lib

FROM ${PYTHON_IMAGE} AS pipeline-build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY locks/pipeline.txt /locks/
RUN python -m venv /opt/pipeline \
 && /opt/pipeline/bin/python -m pip install --quiet --require-hashes -r /locks/pipeline.txt
COPY --from=wheel /wheels /wheels
RUN /opt/pipeline/bin/python -m pip install --quiet --no-deps /wheels/strata_sdk-*.whl /wheels/strata_pipeline-*.whl

FROM ${PYTHON_IMAGE} AS pipeline
LABEL org.opencontainers.image.title="strata-pipeline" \
      org.opencontainers.image.description="The data pipeline of a Strata relay, on Spark" \
      org.opencontainers.image.licenses="Apache-2.0"
# The distribution's own Java: 17 or newer, whichever Debian this is. It sets links among manual pages, which slim
# images have no folder for.
RUN apt-get update \
 && mkdir -p /usr/share/man/man1 \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends default-jre-headless tini \
 && rm -rf /var/lib/apt/lists/*
# Drivers, masters and workers have one user: executors write the files of a lake, and the driver renames them.
RUN groupadd --system --gid 10002 strata \
 && useradd --system --uid 10002 --gid strata --home-dir /var/lib/strata --create-home --shell /usr/sbin/nologin strata \
 && install -d -o strata -g strata /lake /var/lib/strata/spark
COPY --from=pipeline-build /opt/pipeline /opt/pipeline
COPY deploy/spark/spark-defaults.conf /etc/spark/
ENV PATH=/opt/pipeline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYSPARK_PYTHON=/opt/pipeline/bin/python \
    SPARK_CONF_DIR=/etc/spark \
    SPARK_LOCAL_DIRS=/var/lib/strata/spark \
    SPARK_WORKER_DIR=/var/lib/strata/spark \
    SPARK_NO_DAEMONIZE=1
USER strata
WORKDIR /var/lib/strata
VOLUME /lake
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--", "strata-pipeline"]
CMD ["--help"]

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="relayd" \
      org.opencontainers.image.description="A relay daemon for the Strata protocol" \
      org.opencontainers.image.licenses="Apache-2.0"
# The kernel drops signals for the first process of a container that the process has no handler for yet: an init
# takes that place, so that SIGTERM counts from the first moment.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/relayd --create-home --shell /usr/sbin/nologin relayd
COPY --from=build /opt/relayd /opt/relayd
COPY --chmod=0755 deploy/docker/healthcheck.py /usr/local/bin/relayd-healthcheck
# A container has its own loopback, so it listens on all of its addresses; what is reachable is up to `ports`.
ENV PATH=/opt/relayd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RELAYD_HOST=0.0.0.0 \
    RELAYD_DATA_DIR=/var/lib/relayd
USER relayd
WORKDIR /var/lib/relayd
VOLUME /var/lib/relayd
EXPOSE 7447
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["relayd-healthcheck"]
ENTRYPOINT ["/usr/bin/tini", "--", "relayd"]
CMD ["serve"]
