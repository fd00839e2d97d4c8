# isomerge on the CPU, from a wheel of this source:
#   docker build -t isomerge .
#   docker run --rm -v "$PWD":/models isomerge merge recipe.yml merged
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip install --no-cache-dir build && python -m build --wheel --outdir /wheels

FROM python:3.12-slim
COPY constraints.txt /wheels/
# torch first, alone and without CUDA: with the others, pip may choose a build with gigabytes of it.
RUN python -m pip install --no-cache-dir "$(grep ^torch== /wheels/constraints.txt)" --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir -c /wheels/constraints.txt "$(ls /wheels/*.whl)[hf,ot,report]" && isomerge --version
WORKDIR /models
ENTRYPOINT ["isomerge"]
CMD ["--help"]
