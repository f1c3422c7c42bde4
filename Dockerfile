# One image for the front end and the ranks. It needs BuildKit, which every current docker has.
#   docker build -t phalanx .
#   docker build -t phalanx --build-arg TORCH_INDEX=<a package index of CPU builds of torch> .
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG TORCH_REQUIREMENT="torch>=2.9,<2.14"
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/phalanx
ENV PATH=/opt/phalanx/bin:$PATH
WORKDIR /src
# From what changes least to what changes most: torch, the other dependencies, the code.
RUN --mount=type=cache,target=/root/.cache/pip \
    echo "$TORCH_REQUIREMENT" > torch.txt \
 && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r torch.txt
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
 && pip install -r requirements.txt
COPY README.md LICENSE NOTICE ./
COPY app app
COPY workers workers
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps . && pip uninstall --yes pip

FROM python:${PYTHON_VERSION}-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Phalanx" \
      org.opencontainers.image.description="One POST, every GPU, the answers in order" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
RUN groupadd --gid 10001 phalanx \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin phalanx \
 && install -d -o 10001 -g 10001 -m 0700 /run/phalanx \
 && install -d /models
COPY --from=build /opt/phalanx /opt/phalanx
ENV PATH=/opt/phalanx/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PHALANX_HOST=0.0.0.0 \
    PHALANX_RUN_DIR=/run/phalanx
USER 10001:10001
WORKDIR /models
EXPOSE 8000
ENTRYPOINT ["phalanx"]
CMD ["serve"]
