# The demo in a container, and what compose.yaml starts; PyTorch is the CPU build.
FROM python:3.12-slim
WORKDIR /opt/fedgs
COPY . .
ENV UV_SYSTEM_PYTHON=1 UV_TORCH_BACKEND=cpu UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1
RUN pip install --no-cache-dir uv==0.12.24 \
    && uv export --quiet --frozen --all-extras --no-hashes --no-emit-project --output-file versions.txt \
    && uv pip install --quiet --constraint versions.txt ".[all]" \
    && useradd --create-home fedgs && install --directory --owner fedgs --mode 700 /certs /state
USER fedgs
WORKDIR /home/fedgs
CMD ["fedgs", "demo"]
