"""One stage of a pipelined Hugging Face model: its own layers, run by the model's own outer code.

A stage keeps the whole model as an outline on the meta device, with its own parts put in. For each micro batch the
decoder's own ``forward`` runs over recorders in place of its layers: that tells what it hands to each of them (rotary
positions, masks, by whatever rule), and that it does nothing else to the hidden states on their way. The layers then
run one by one, as layers of DeepSpeed's pipeline; the output layer and the loss are run by the model's ``forward``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .microbatches import MicroBatch
from .model import ModelState, attention_mask, own_dropout
from .parts import Parts, find_parts, outline

Carried = tuple[Tensor, Tensor, MicroBatch]  # what goes from layer to layer: x, a spark for checkpointing, whose it is


class _Recorder(nn.Module):
    """Stands for a layer while the outer code runs: notes what it is given, and gives back the hidden states."""

    def __init__(self, part: nn.Module, seen: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]):
        super().__init__()
        self.__dict__["part"], self.__dict__["seen"] = part, seen  # not a child: its parameters are counted elsewhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["part"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, *more = args or (kwargs.pop("hidden_states"),)
        self.__dict__["seen"].append((x, tuple(more), kwargs))
        return x


class _Answer(nn.Module):
    """Stands for the decoder while the output layer and the loss run: answers with the hidden states that came."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


@contextmanager
def _in_place(root: nn.Module, modules: dict[str, nn.Module]) -> Iterator[None]:
    places = [(root.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in modules]
    kept = [owner._modules[leaf] for owner, leaf in places]
    try:
        for (owner, leaf), module in zip(places, modules.values(), strict=True):
            owner._modules[leaf] = module
        yield
    finally:
        for (owner, leaf), before in zip(places, kept, strict=True):
            owner._modules[leaf] = before


@dataclass
class Stage:
    """This rank's part of the model. `model` is the outline with the own parts in it, under their Hugging Face names.

    source: where weights come from, or None to initialise them, from `seed` and the place of the part in the model.
    current: the micro batch whose forward runs, or ran last; `left` are those to come. with_loss: the last stage gives
    the loss, else logits; evaluated: its hidden states, of the last evaluation.
    """

    model: PreTrainedModel
    parts: Parts
    source: PreTrainedModel | None
    seed: int
    left: list[MicroBatch] = field(default_factory=list)
    current: MicroBatch | None = None
    reached: bool = False
    with_loss: bool = True
    evaluated: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel | PreTrainedConfig, seed: int) -> Stage:
        """Raises ValueError if the model's own code does more than hand hidden states from part to part."""
        whole, source = outline(model), model if isinstance(model, PreTrainedModel) else None
        without = [n for n, p in source.named_parameters() if p.is_meta] if source is not None else []
        if source is not None and without and len(without) < len(list(source.parameters())):
            raise ValueError(f"{without[0]} is on the meta device and other weights are not; give all of them, or none")
        stage = cls(whole, find_parts(whole), None if without else source, seed)
        inside = tuple(f"{name}." for name in (stage.parts.embedding, stage.parts.layers, stage.parts.head))
        device = get_accelerator().current_device_name()
        owners = {name.rpartition(".")[0] for name, _ in whole.named_buffers() if not name.startswith(inside)}
        for name in sorted(owners):  # rotary embeddings and the like: every stage has its own
            stage._fill(name)
            whole.get_submodule(name).to(device)
        whole.train()  # also what the outer code drops in training
        stage._outer_arguments(torch.zeros(1, 2, dtype=torch.int64), {"position_ids": torch.arange(2)[None]}, None)
        return stage

    def build(self, name: str) -> nn.Module:
        """The part `name` with weights, on this rank only."""
        self._fill(name)
        if self.parts.tied and name == self.parts.embedding:
            head: Any = self.model.get_submodule(self.parts.head)
            head.weight = self.model.get_submodule(name).weight
        return self.model.get_submodule(name)

    def parameters_of(self, name: str) -> int:
        """Trainable parameters of a part, of this stage or another."""
        return sum(p.numel() for p in self.model.get_submodule(name).parameters() if p.requires_grad)

    def _fill(self, name: str) -> None:
        if self.source is not None:
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._modules[leaf] = self.source.get_submodule(name)
            return
        module = self.model.get_submodule(name).to_empty(device="cpu")
        tensors = {n: t for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_floating_point()}
        with torch.random.fork_rng([]), torch.no_grad():
            names = self.parts.names()
            torch.manual_seed(self.seed + (names.index(name) if name in names else len(names)))
            for tensor in tensors.values():
                tensor.fill_(torch.nan)
            module.apply(self.model._init_weights)
        lost = [n for n, t in tensors.items() if t.isnan().any()]
        if lost:
            raise ValueError(
                f"{name}.{lost[0]} is on the meta device and {type(self.model).__name__} does not initialise it by "
                "itself; give ds_tsp.pipeline the model with its weights"
            )

    @property
    def state(self) -> ModelState:
        return cast(ModelState, self.model.tsp_state)

    # What follows runs micro batches.

    @contextmanager
    def running(self, x: Tensor) -> Iterator[MicroBatch]:
        """The next micro batch, while its forward runs on `x`, token ids or hidden states."""
        state = self.state
        self.current = micro = self.left.pop(0)
        state.batch, state.agreed = micro.batch, micro.agreed
        try:
            micro.layers = self._outer_arguments(x, micro.batch.arguments, attention_mask(micro.batch, state))
            with own_dropout(state, self.model):
                yield micro
        finally:
            state.batch = state.agreed = None
        if not self.reached:
            self._check_reach()
            self.reached = True

    def loss(self, hidden: Tensor) -> Tensor:
        """The loss of the micro batch that just ran, by the model's own code."""
        assert self.current is not None
        return self._finish(hidden, self.current, labels=self.current.batch.shift_labels).loss

    def logits(self, hidden: Tensor) -> Tensor:
        """The local logits of the micro batch that just ran."""
        assert self.current is not None
        return self._finish(hidden, replace(self.current, batch=replace(self.current.batch, shift_labels=None))).logits

    def _finish(self, hidden: Tensor, micro: MicroBatch, **labels: Any) -> Any:
        state = self.state
        state.batch, state.agreed = micro.batch, micro.agreed
        items = {} if micro.items is None or not labels else {"num_items_in_batch": micro.items}
        try:
            with _in_place(self.model, {self.parts.base: _Answer(hidden)}):
                return self.model(**labels, **items, use_cache=False, return_dict=True)
        finally:
            state.batch = state.agreed = None

    def _outer_arguments(
        self, given: Tensor, arguments: dict[str, Any], mask: Tensor | None
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What the decoder hands to each of its layers, for token ids [B, s] or hidden states [B, s, D]."""
        decoder, embedding = self.model.get_submodule(self.parts.base), cast(Any, self.model.get_input_embeddings())
        dtype = (given if given.is_floating_point() else embedding.weight).dtype
        device = get_accelerator().current_device_name()
        x = torch.empty((), dtype=dtype, device=device).expand(*given.shape[:2], embedding.embedding_dim)
        seen: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        layers: Any = self.model.get_submodule(self.parts.layers)
        stand_ins: dict[str, nn.Module] = {self.parts.layers: nn.ModuleList(_Recorder(m, seen) for m in layers)}
        if self.parts.norm:
            stand_ins[self.parts.norm] = _Recorder(self.model.get_submodule(self.parts.norm), seen)
        positions = arguments["position_ids"].to(device)
        with torch.no_grad(), _in_place(self.model, stand_ins):
            out = decoder(inputs_embeds=x, position_ids=positions, attention_mask=mask, use_cache=False)
        if len(seen) != len(layers) + bool(self.parts.norm) or any(
            arrived is not x for arrived in (out.last_hidden_state, *(entry[0] for entry in seen))
        ):
            raise ValueError(
                f"{type(decoder).__name__} does more to the hidden states than to hand them from layer to layer "
                "(scales, drops or normalises them), and each stage would do it again; a pipeline cannot run this model"
            )
        return [(more, keywords) for _, more, keywords in seen[: len(layers)]]

    def _check_reach(self) -> None:
        layers: Any = self.model.get_submodule(self.parts.layers)
        own = [layer for layer in layers if not any(p.is_meta for p in layer.parameters())]
        called = sum(core.called for layer in own for m in layer.modules() if (core := getattr(m, "tsp_core", None)))
        if called < len(own):
            raise ValueError(
                f"{type(self.model).__name__} has {len(own)} layers on this stage, but only {called} attended through "
                "transformers' attention interface; the others would see this rank's tokens only"
            )


class Part(nn.Module):
    """One layer of the pipeline: a part of the model under the name it has there."""

    def __init__(self, stage: Stage, name: str):
        super().__init__()
        self.hf_name = name
        owner, _, leaf = name.rpartition(".")
        self.number = int(leaf) if owner == stage.parts.layers else None
        self.leaf = "layer" if self.number is not None else leaf
        self.ends = name == stage.parts.head  # run with the loss, by the model's own code
        self.add_module(self.leaf, stage.build(name))

    def forward(self, carried: Carried) -> Carried:
        x, spark, micro = carried
        if self.number is not None:
            more, keywords = micro.layers[self.number]
            x = getattr(self, self.leaf)(x, *more, **keywords)
        elif not self.ends:
            x = getattr(self, self.leaf)(x)
        return x, spark, micro
