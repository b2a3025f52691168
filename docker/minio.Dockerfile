# MinIO, built from its Go module, whose bytes Go checks against its public checksum database:
#
#   docker build --file docker/minio.Dockerfile --tag shalekv-minio:local .
#
# It takes minutes, once. MinIO is free software under the GNU AGPL 3, is no part of ShaleKV, and talks
# to it over the network only; the image holds its licence.

ARG GO_IMAGE=golang:1.26
ARG BASE_IMAGE=debian:trixie-slim

FROM ${GO_IMAGE} AS build
# The last version; tests/servers/obtain.py builds the same for the tests.
ARG MINIO_VERSION=v0.0.0-20260212201848-7aac2a2c5b7c
ENV CGO_ENABLED=0 \
    GOBIN=/minio
RUN go install -trimpath -ldflags="-s -w" "github.com/minio/minio@${MINIO_VERSION}" \
    && cp "$(go env GOMODCACHE)/github.com/minio/minio@${MINIO_VERSION}"/LICENSE \
        "$(go env GOMODCACHE)/github.com/minio/minio@${MINIO_VERSION}"/CREDITS /minio/

FROM ${BASE_IMAGE}
COPY --from=build /minio/LICENSE /minio/CREDITS /usr/share/doc/minio/
COPY --from=build /minio/minio /usr/local/bin/
# The mount point of its volume: a new volume takes over owner and mode.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /data
USER 10001:10001
EXPOSE 9000
STOPSIGNAL SIGTERM
ENTRYPOINT ["minio"]
CMD ["server", "--address", ":9000", "/data"]
