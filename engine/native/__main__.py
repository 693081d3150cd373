"""`python -m engine.native`: compile the kernels now, so that the first start does not have to."""

import sys

import torch

from engine import native

if native.kernels(torch.float32) is None:
    print("no C++ compiler that can build the CPU kernels; torch will do their work", file=sys.stderr)
