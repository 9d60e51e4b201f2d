# SPDX-License-Identifier: Apache-2.0
# Stands for a vLLM image: Python and the two libraries that vLLM's CPU build loads. vLLM itself is mounted from the
# node, where it is installed once (tools/vllm_env.py). Nothing of kvpool is in it.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 libgomp1 && rm -rf /var/lib/apt/lists/*
