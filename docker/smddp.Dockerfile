# A GPU node's container: CUDA, EFA's libfabric, torch, DeepSpeed and deepspeed-smddp.
#
#   docker build -f docker/smddp.Dockerfile -t deepspeed-smddp .
#   docker run --gpus all --device /dev/infiniband/uverbs0 --ulimit memlock=-1 --shm-size 8g \
#     --cap-add SYS_PTRACE deepspeed-smddp smddp doctor
#
# One --device for each EFA device of the instance. SYS_PTRACE lets the ranks of a host read one
# another's memory. The devel image, as DeepSpeed compiles some of its optimizers at their first use.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

ARG TORCH=2.13.0
ARG DEEPSPEED=0.19.8
ARG EFA_INSTALLER=1.43.2

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Ubuntu keeps only the newest version of a package: a pinned one could not be installed next month.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates curl g++ git gnupg iproute2 numactl openssh-client pdsh python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

# libfabric with the EFA provider, in /opt/amazon/efa; the kernel module is the host's. The package loads
# this libfabric before any other. The archive is checked against Amazon's key.
WORKDIR /tmp/efa
RUN base=https://efa-installer.amazonaws.com \
 && archive=aws-efa-installer-${EFA_INSTALLER}.tar.gz \
 && curl -fsSLO "$base/aws-efa-installer.key" \
 && curl -fsSLO "$base/$archive" \
 && curl -fsSLO "$base/$archive.sig" \
 && gpg --batch --import aws-efa-installer.key \
 && gpg --batch --verify "$archive.sig" "$archive" \
 && tar -xzf "$archive" --strip-components=1 \
 && apt-get update \
 && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
 && rm -rf /tmp/efa /var/lib/apt/lists/*

# The package is compiled for the torch that is installed first. CMake finds EFA's headers by the prefix
# and nvcc by its usual place.
WORKDIR /opt/deepspeed-smddp
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:/opt/amazon/efa/bin:$PATH
RUN python3 -m venv /opt/venv && pip install --no-cache-dir "torch==${TORCH}"
COPY requirements/build.txt requirements/build.txt
RUN pip install --no-cache-dir -r requirements/build.txt \
 && pip install --no-cache-dir --no-build-isolation "deepspeed==${DEEPSPEED}"
COPY . .
# hadolint ignore=DL3013
RUN CMAKE_PREFIX_PATH=/opt/amazon/efa pip install --no-cache-dir --no-build-isolation ".[plots]" \
 && smddp doctor

WORKDIR /workspace
CMD ["smddp", "doctor"]
