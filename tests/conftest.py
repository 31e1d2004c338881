"""The tensors are small: threads of torch's own would mostly wait for each other."""

import torch

torch.set_num_threads(1)
