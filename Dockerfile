# Build: everything is installed from the lock files, by hash.
FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY locks ./locks
RUN python -m venv /opt/relayd \
 && /opt/relayd/bin/python -m pip install --quiet --require-hashes -r locks/relay.txt \
 && python -m venv /opt/build \
 && /opt/build/bin/python -m pip install --quiet --require-hashes -r locks/build.txt
COPY pyproject.toml README.md ./
COPY client ./client
COPY relayd ./relayd
COPY migrations ./migrations
RUN PATH=/opt/build/bin:$PATH /opt/build/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/relayd/bin/python -m pip install --quiet --no-deps /wheels/*.whl \
 && /opt/relayd/bin/python -m compileall -q /opt/relayd/lib

FROM python:3.11-slim
LABEL org.opencontainers.image.title="relayd" \
      org.opencontainers.image.description="A relay daemon for the Strata protocol" \
      org.opencontainers.image.licenses="Apache-2.0"
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
ENTRYPOINT ["relayd"]
CMD ["serve"]
