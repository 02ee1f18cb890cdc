# The tool in a container, for CPU and GPU: the torch wheels of Linux bring CUDA with them.
#   docker build -t cdtrans .
#   docker run --rm -v "$PWD:/data" cdtrans adapt photos snapshots --out runs/first              # CPU
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/data" cdtrans adapt photos snapshots ...  # GPU
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[onnx]'
ENV CDTRANS_CACHE=/data/.cdtrans-cache
WORKDIR /data
ENTRYPOINT ["cdtrans"]
