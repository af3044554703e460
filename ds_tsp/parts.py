"""The parts of a Hugging Face decoder model that a pipeline is made of, found in the model itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Parts:
    """Where the parts of a decoder model are: names of modules, in the order in which they run."""

    base: str
    embedding: str
    layers: str
    count: int
    norm: str | None
    head: str
    tied: bool

    def names(self) -> list[str]:
        layers = [f"{self.layers}.{i}" for i in range(self.count)]
        return [self.embedding, *layers, *([self.norm] if self.norm else []), self.head]


def find_parts(model: PreTrainedModel) -> Parts:
    """Raises ValueError naming what a pipeline of this model would leave out."""
    kind, decoder, head = type(model).__name__, model.get_decoder(), model.get_output_embeddings()
    base = next((name for name, child in model.named_children() if child is decoder and decoder is not model), None)
    if base is None or head is None:
        raise ValueError(f"a pipeline needs a causal language model with a decoder and an output layer; got {kind}")
    names = {id(module): name for name, module in model.named_modules()}
    count = model.config.get_text_config().num_hidden_layers
    lists = [n for n, m in decoder.named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise ValueError(f"the decoder of {kind} has {len(lists)} lists of {count} layers, and a pipeline needs one")
    layers, embedding = f"{base}.{lists[0]}", names[id(model.get_input_embeddings())]
    known = (embedding, names[id(head)])
    others = [f"{base}.{n}" for n, m in decoder.named_children() if any(True for _ in m.parameters())]
    others = [n for n in others if n != layers and n not in known]
    norm = others[0] if len(others) == 1 else None
    taken = tuple(f"{name}." for name in (*known, layers, norm) if name)
    left = [name for name, _ in model.named_parameters(remove_duplicate=False) if not name.startswith(taken)]
    left += [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in ("", base)]
    if left:
        raise ValueError(f"a pipeline of {kind} would leave out {left[0]}: it has embedding, layers, norm and head")
    tied = head.weight is model.get_input_embeddings().weight
    if tied and len(list(head.parameters())) > 1:
        raise ValueError(f"the output layer of {kind} is tied and has a bias, which a pipeline would leave out")
    return Parts(base, embedding, layers, count, norm, names[id(head)], tied)


def outline(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedModel:
    """The model without weights: a copy on the meta device."""
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(model)
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if trained else empty
    return copy.deepcopy(model, memo)
