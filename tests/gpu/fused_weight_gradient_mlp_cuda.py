"""What Megatron imports by the name of Apex's extension if gradient accumulation is fused: the same sums, by a product
of Transformer Engine that adds to main_grad as it stores.

Megatron asks for the module as soon as the flag is set, but only its own linear layers (here: the output layer) call
it; Transformer Engine's layers have a product of their own.
"""

from transformer_engine.pytorch.cpp_extensions import general_gemm


def wgrad_gemm_accum_fp32(rows, gradient, main_grad):
    """main_grad [N, K] += gradient [..., N].T @ rows [..., K]"""
    rows, gradient = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (rows, gradient))
    general_gemm(rows, gradient, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
