"""Tiny models for the tests: real Hugging Face classes, odd sizes, and a mode in which they compute in fp64
throughout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,  # H*E != D
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"layer_types": ["full_attention"] * 2},
    "qwen3": {"layer_types": ["full_attention"] * 2},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0,
               "query_pre_attn_scalar": 13, "tie_word_embeddings": True},
}  # fmt: skip


def tiny(family: str, **sizes: Any) -> PreTrainedModel:
    """A random model, the same on every call with the same arguments; reference attention is transformers' eager
    one."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**_SIZES, **_OWN.get(family, {}), **sizes})
    config._experts_implementation = "eager"  # the grouped kernel has no fp64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at constants: make every one tell
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens(batch: int, length: int, vocabulary: int = 53, seed: int = 11) -> dict[str, Tensor]:
    """Random ids, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}


@contextmanager
def fp64_throughout() -> Iterator[None]:
    """While active, the casts to fp32 inside Hugging Face's norms, softmax and loss leave fp64 tensors alone.

    Without it a "float64" model rounds to fp32 in every layer, and parity could be asked to 1e-6 only. Patches torch's
    methods, not a TorchFunctionMode: such a mode does not reach the recompute inside autograd's backward.
    """
    to, softmax = Tensor.to, torch.nn.functional.softmax

    def keep(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lossy = self.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return self if lossy else to(self, *args, **kwargs)

    def keep_softmax(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    with (
        mock.patch.object(Tensor, "to", keep),
        mock.patch.object(Tensor, "float", lambda self: keep(self, torch.float32)),
        mock.patch.object(torch.nn.functional, "softmax", keep_softmax),
    ):
        yield
