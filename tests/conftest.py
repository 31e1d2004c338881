"""The tensors are small: threads of torch's own would mostly wait for each other."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
# Helpers that tests of several rooms share: cases.py, survivors.py, training_runs.py.
sys.path[:0] = [str(Path(__file__).parent / room) for room in ("api", "training")]
