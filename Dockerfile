# The tool in a container, for CPU and GPU: the torch wheels of Linux bring CUDA with them.
#   docker build -t cdtrans .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" cdtrans adapt photos snapshots --out runs/first
# On a GPU, also give docker run: --gpus all --shm-size 8g
# A smaller image without CUDA: build with --build-arg PIP_EXTRA_INDEX_URL=ADDRESS, an index of torch's CPU wheels.
FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
# The GPU kernels need a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[onnx]'
# Any user can write to these; decoded images and downloaded weights stay in the mounted folder.
ENV HOME=/tmp CDTRANS_CACHE=/data/.cdtrans-cache HF_HOME=/data/.cdtrans-cache/huggingface
WORKDIR /data
ENTRYPOINT ["cdtrans"]
