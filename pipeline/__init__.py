"""The library behind the stages: one frozen base, many adapters, two loops."""

import logging
import os

# OpenMP threads that spin for long while they wait make torch 10 to 20 times slower as soon as anything else runs on the
# machine; threads that go to sleep at once make it up to 1.7 times slower when nothing else does. A short spin gives both
# back (docs/performance.md). The variables are read when torch loads its OpenMP runtime, so before any module imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# oneDNN, and torch beside it, keep a compiled kernel for each shape of a product that they have seen: by default a thousand of
# them, half a gigabyte where rows have all lengths. A pass goes through the same few shapes layer after layer: this many are
# enough, and no slower (docs/performance.md). Read at the first product.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
# cuBLAS needs a fixed workspace for deterministic results; it is read when the first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Forked tokenizer threads bring no speed at our sizes and print warnings.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# MLflow tells its makers what it is used for; nobody here was asked. Read when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# bitsandbytes says at import that it could fetch faster kernels from a hub. It must not: pipeline/quantization.py says why.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
