# SPDX-License-Identifier: Apache-2.0
# What an engine's pod needs of kvpool: pure Python in /payload, whose dependencies every vLLM image has.
# As an init container it copies that into the folder given as argument (/kvpool); as an image volume it is mounted.
# Build it from the repository's root: `python -m tools.images payload`. BASE_IMAGE needs nothing but cp.
ARG BASE_IMAGE=busybox:1.37
ARG BUILD_IMAGE=python:3.13-slim

FROM ${BUILD_IMAGE} AS build
# Where packages come from, and whom to trust with them; empty is what pip does by itself.
ARG PIP_CERT=""
ARG PIP_INDEX_URL=""
RUN ["python3", "-m", "venv", "/build"]
WORKDIR /src
COPY . .
# Not compiled: the engine's Python may be another version, and reads this from where it cannot write.
RUN ["/build/bin/pip", "install", "--no-cache-dir", "--no-deps", "--no-compile", "--target", "/payload", "."]
RUN ["rm", "-r", "/payload/kvpool_operator", "/payload/bin"]

FROM ${BASE_IMAGE}
COPY --from=build /payload /payload
LABEL org.opencontainers.image.title="kvpool connector payload" org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
ENTRYPOINT ["cp", "-r", "/payload/."]
CMD ["/kvpool"]
