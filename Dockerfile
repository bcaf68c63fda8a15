# The Redrive worker and command: the runtime alone, in the versions of requirements.lock, for an unprivileged user.

FROM python:3.13.16-slim-bookworm AS build

WORKDIR /src

# uv, checked against the lock.
COPY requirements.lock ./
RUN awk '/^[^ ]/ { uv = /^uv==/ } uv' requirements.lock > /tmp/uv.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r /tmp/uv.txt \
    && python -m venv --without-pip /opt/redrive

ENV VIRTUAL_ENV=/opt/redrive \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1

# The dependencies have a layer of their own: a change of the source does not install them again.
COPY pyproject.toml ./
RUN uv pip install --constraints requirements.lock -r pyproject.toml --extra postgresql

COPY LICENSE README.md ./
COPY contracts contracts
COPY activities activities
COPY workflows workflows
COPY workers workers
COPY cli cli
RUN uv pip install --no-deps --build-constraints requirements.lock .


FROM python:3.13.16-slim-bookworm

LABEL org.opencontainers.image.title="Redrive" \
      org.opencontainers.image.description="Durable runs of HTTP tool calls on Temporal" \
      org.opencontainers.image.licenses="Apache-2.0"

RUN groupadd --system --gid 10001 redrive \
    && useradd --system --uid 10001 --gid redrive --home-dir /var/lib/redrive --no-create-home redrive \
    && install --directory --owner=redrive --group=redrive --mode=0750 /var/lib/redrive

COPY --from=build /opt/redrive /opt/redrive

ENV PATH=/opt/redrive/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    REDRIVE_TOOLS=/etc/redrive/tools.toml \
    REDRIVE_LEDGER=sqlite:////var/lib/redrive/ledger.db

WORKDIR /var/lib/redrive
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["redrive"]
CMD ["worker"]
