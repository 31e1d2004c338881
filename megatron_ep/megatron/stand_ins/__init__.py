"""What stands in for hardware that Megatron asks for: `host_runtime.py` answers requests for CUDA on a machine without
a GPU, `host_script.py` does so for Megatron's own scripts, `gpu_runtime.py` runs ranks on GPUs without NCCL.

Each is opt-in, and replaces functions of torch and Megatron in this process only.
"""
