# The serverless image. Build arguments:
#   MODEL_NAME       bake this hub model; empty = fetched at start, cached on the network volume
#   MODEL_REVISION   branch, tag or commit of it
#   FLASH_ATTN       what pip shall install as flash-attn: a requirement or the address of a wheel that fits this
#                    torch and CUDA; empty = torch's own attention kernels
#   secret HF_TOKEN  docker build --secret id=HF_TOKEN,env=HF_TOKEN ...   (never stored in a layer)
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PATH=/opt/worker/.venv/bin:$PATH

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/worker
# The dependencies come first: they change seldom, and the layer is large.
COPY pyproject.toml builder/requirements.lock ./
RUN python3 -m venv .venv \
    && mkdir -p worker engine templates gateway builder && touch handler.py README.md \
    && pip install --constraint requirements.lock .

ARG FLASH_ATTN=""
RUN if [ -n "$FLASH_ATTN" ]; then pip install --no-build-isolation --no-deps einops "$FLASH_ATTN"; fi

COPY . .

ARG MODEL_NAME=""
ARG MODEL_REVISION=""
# The worker looks into the cache of the hub library (HF_HOME) before it asks the hub.
ENV MODEL_NAME=$MODEL_NAME MODEL_REVISION=$MODEL_REVISION HF_HOME=/models
RUN --mount=type=secret,id=HF_TOKEN \
    if [ -n "$MODEL_NAME" ]; then \
        export HF_TOKEN="$(cat /run/secrets/HF_TOKEN 2>/dev/null || true)" \
        && python -m builder.fetch_model; \
    fi

CMD ["python", "-u", "handler.py"]
