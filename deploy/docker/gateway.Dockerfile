# The gateway smg, as it is on PyPI; docs/gateway.md explains it.
#
#   docker build -f deploy/docker/gateway.Dockerfile -t prefixcache-gateway .

ARG BASE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE}

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/smg \
 && /opt/smg/bin/pip install --no-cache-dir smg==1.13.0 \
 && groupadd --gid 10002 smg \
 && useradd --uid 10002 --gid 10002 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin smg

ENV PATH=/opt/smg/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1

# As numbers, so that Kubernetes can see that it isn't root.
USER 10002:10002
WORKDIR /tmp
EXPOSE 30000 29000
STOPSIGNAL SIGTERM
ENTRYPOINT ["smg"]
CMD ["launch", "--help"]
