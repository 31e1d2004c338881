# On NVIDIA's image of PyTorch, which brings torch, nvcc and Transformer Engine, and keeps them:
#     docker build --tag megatron_ep .
#     docker run --rm --gpus all --ipc host --ulimit memlock=-1 megatron_ep
# CUDA is what the image's torch was built with. Images up to 25.06 have 12, later ones 13. No GPU is seen while an image
# is built, so ARCHITECTURES says which it is for, as CMake writes them: 80 for A100, 90 for Hopper, "80;90", or all.
ARG BASE=nvcr.io/nvidia/pytorch:25.09-py3

FROM ${BASE} AS build
ARG CUDA=13
ARG ARCHITECTURES=90
WORKDIR /src
COPY . .
# The library that the extension is built against. Without dependencies: torch stays.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps cmake ninja pybind11 "setuptools>=77" "nvidia-nvshmem-cu${CUDA}" \
    && MEGATRON_EP_CUDA=1 "MEGATRON_EP_ARCHITECTURES=${ARCHITECTURES}" \
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${BASE}
ARG CUDA=13
COPY --from=build /wheels /wheels
# An installed megatron-core stays, too.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps "nvidia-nvshmem-cu${CUDA}" \
    && pip install --no-cache-dir "$(ls /wheels/*.whl)[megatron,train]" \
    && rm -r /wheels
CMD ["megatron-ep", "env"]
