# lt_zero with kernels that are compiled when the image is built: docker build -t lt_zero .
# With CUDA kernels (no GPU is needed to build): docker build --build-arg CUDA=1 -t lt_zero .
FROM python:3.11-slim

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The compiler stays: torch.compile needs it.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/*

ENV LT_ZERO_CACHE=/opt/lt_zero/kernels \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/lt_zero

COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY conf conf
COPY lt_zero lt_zero

RUN python -m pip install -c constraints.txt .

ARG CUDA=0
RUN if [ "$CUDA" = 1 ]; then \
        python -m pip install "nvidia-cuda-nvcc>=13,<14" "nvidia-cuda-runtime>=13,<14" "nvidia-cuda-cccl>=13,<14" \
        && lt-zero ops build --cuda; \
    else \
        lt-zero ops build; \
    fi

WORKDIR /work
CMD ["lt-zero", "doctor"]
