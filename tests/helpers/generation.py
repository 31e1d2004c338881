"""Megatron's own inference engine on a small model. Functions of a rank, on the host or on a GPU."""

import contextlib
import os
import warnings
from types import SimpleNamespace
from unittest import mock

import cached_attention
import torch
from megatron.core import tensor_parallel
from megatron.core.inference import utils
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import static_engine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend

import megatron_ep as ep
from megatron_ep.megatron.layer import ep_layer_spec

VOCABULARY, MAX_TOKENS = 64, 32  # the longest a sequence gets
MODEL = dict(
    num_layers=2,
    attention_backend=AttnBackend.local,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    normalization="RMSNorm",
)
PADDING = "moe_pad_experts_for_cuda_graph_inference"


class Tokenizer:
    """Prompts are numbers with blanks between them."""

    vocab_size, eod, bos = VOCABULARY, -1, None

    def tokenize(self, text):
        return [int(word) for word in text.split()]

    def detokenize(self, tokens):
        return " ".join(map(str, tokens))


def make_model(config, ours, weights=None, **tracker):
    """A GPTModel with Megatron's all-to-all or our dispatcher; tracker: of its random states, where graphs need one."""
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True, **tracker)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if ours:
        spec = ep_layer_spec(spec)
    with mock.patch.dict(os.environ):  # it leaves the choice of attention there, for all models of the process
        model = GPTModel(config, spec, VOCABULARY, MAX_TOKENS, position_embedding_type="rope")
    if torch.cuda.is_available():
        model.cuda()
    if weights is not None:
        model.load_state_dict(weights)
    return model.to(config.params_dtype)


def make_engine(model, batch, pads=True):
    """Megatron's static engine for that many prompts at a time. pads: whether it pads the experts for decoding."""
    config = model.config
    context = StaticInferenceContext(max_batch_size=batch, max_sequence_length=MAX_TOKENS)
    if hasattr(config, PADDING):  # Megatron-Core 0.19
        setattr(config, PADDING, pads)
        wrapped = GPTInferenceWrapper(model, context)
    else:
        from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

        settings = InferenceWrapperConfig(
            hidden_size=config.hidden_size,
            params_dtype=config.params_dtype,
            inference_batch_times_seqlen_threshold=-1,
            padded_vocab_size=VOCABULARY,
            inference_max_requests=batch,
            inference_max_seq_length=MAX_TOKENS,
            moe_pad_experts_for_cuda_graph_inference=pads,
        )
        wrapped = GPTInferenceWrapper(model, settings, context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return static_engine.StaticInferenceEngine(TextGenerationController(wrapped, Tokenizer()), legacy=True)


def generate(engine, prompts, new_tokens):
    """The new tokens of each prompt, as lists."""
    sampling = SamplingParams(num_tokens_to_generate=new_tokens, top_k=1)
    sampling.no_early_termination = True
    # It draws a progress bar, and wants the library for it; and it looks for the MoE layers of one model only.
    progress = mock.patch.multiple(static_engine, HAVE_TQDM=True, tqdm=mock.MagicMock())
    layers = mock.patch.object(utils, "moe_layer_cache", None)
    mode = getattr(utils, "InferenceMode", None)  # of Megatron-Core 0.19, on since the engine was made
    if mode is not None:
        mode.set_active()
    try:
        with progress, layers, cached_attention.installed():
            results = engine.generate(prompts=prompts, sampling_params=sampling)
            utils.set_decode_expert_padding(engine.controller.inference_wrapped_model.model, False)
    finally:
        if mode is not None:
            mode.unset_active()
    return [result.generated_tokens.tolist() for result in results]


@contextlib.contextmanager
def counted():
    """Counts dispatches through rings and in one hop."""
    calls, dispatch = SimpleNamespace(rings=0, one_hop=0), ep.dispatch

    def counting(*arguments, **options):
        received = dispatch(*arguments, **options)
        if received.handle.one_hop is None:
            calls.rings += 1
        else:
            calls.one_hop += 1
        return received

    with mock.patch.object(ep, "dispatch", counting, create=True):
        yield calls
