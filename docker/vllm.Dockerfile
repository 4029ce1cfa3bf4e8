# Adds DCR's plugins to a fleet's own vLLM image; vLLM itself is not changed.
#   docker build -f docker/vllm.Dockerfile --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0 -t vllm-dcr .
# Run it as before, with --worker-extension-cls, a volume for /run/dcr, and /dev/shm shared with the subscriber. The socket
# is in a subdirectory that the plugin makes for its own user alone: the volume itself may be writable for all, as an
# emptyDir of Kubernetes is. Server and subscriber run as one user (DCR's image: 10001).
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.11-slim AS wheel
WORKDIR /src
RUN pip install --no-cache-dir hatchling==1.33.0
COPY pyproject.toml README.md LICENSE ./
COPY dcr_daemon dcr_daemon
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${VLLM_IMAGE}
COPY --from=wheel /dist /dist
# --no-deps: torch, numba and msgspec are those of vLLM and must not change. The other packages that the plugins need are
# listed here; the daemons' packages (boto3, watchdog, …) do not belong in a serving image.
RUN python3 -m pip install --no-cache-dir --no-deps /dist/*.whl xxhash==4.1.0 zstandard==0.25.0 && rm -r /dist
ENV VLLM_PLUGINS=dcr,dcr_endpoint DCR_SOCKET=/run/dcr/private/vllm.sock
