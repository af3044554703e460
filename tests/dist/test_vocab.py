"""The vocabulary's two ends, cut over the axis: exact, tied or not, and never whole."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_tsp import layout, vocab
from ds_tsp.blocks import plan_model
from ds_tsp.comm import Wire
from ds_tsp.config import TSPConfig
from ds_tsp.grad_sync import sum_replicated_gradients
from ds_tsp.inject import inject
from ds_tsp.layout import SequenceLayout, WeightCut, cut_bounds
from ds_tsp.mesh import Mesh
from ds_tsp.recompute import Recompute
from tests.dist.test_fold import assert_small, folded_pair, gradient_errors, model_job
from tests.dist.test_memory import Largest
from tests.harness import assert_all_ranks_raise, run_ranks
from tests.models import fp64_throughout, tiny, tokens


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "phi"])
def test_ends_of_every_kind(family: str, tied: bool, size: int) -> None:
    """Softcap, logit scale (cohere multiplies, granite divides), bias (phi); 53 words on 2, 3, 4 ranks."""
    own = {"cohere": {"logit_scale": 0.37}, "granite": {"logits_scaling": 1.7}}.get(family, {})
    job = {"tie_word_embeddings": tied, "num_hidden_layers": 1, **own}
    if family == "phi":
        job |= {"num_key_value_heads": 4, "hidden_size": 32, "head_dim": 8}
    assert_small(run_ranks(size, model_job, family, size, length=13, **job))


@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_left_whole(size: int) -> None:
    assert_small(run_ranks(size, model_job, "gemma2", size, length=13, tsp={"shard_vocab": False}))


def tile_job(elements: int) -> dict[str, float]:
    layout.TILE_ELEMENTS = (elements, elements)
    return model_job("gemma2", 3, 17)


@pytest.mark.parametrize("elements", [1, 100, 1000])
def test_any_tile(elements: int) -> None:
    assert_small(run_ranks(3, tile_job, elements))


def smoothing_job(size: int, smoothing: float) -> dict[str, float]:
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", size, num_hidden_layers=1)
        batch = tokens(2, 13)
        logits = reference(input_ids=batch["input_ids"]).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=smoothing)
        got = model(**batch, label_smoothing=smoothing).loss
        expected.backward()
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("size", [1, 3])
def test_label_smoothing(size: int) -> None:
    assert_small(run_ranks(size, smoothing_job, size, 0.3))


def skewed_job(size: int, word: int) -> dict[str, float]:
    """All tokens are one word: one rank owns every row, and no rank may hold all tokens' rows for it."""
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", size, num_hidden_layers=1, pad_token_id=4)
        ids = torch.full((2, 13), word)
        losses = [m(input_ids=ids, labels=ids).loss for m in (reference, model)]
        for loss in losses:
            loss.backward()
        return {"loss": (losses[0] - losses[1]).abs().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("word", [0, 4, 52])  # 4 is the padding word, whose row of the embedding is never trained
def test_all_tokens_are_one_word(word: int) -> None:
    assert_small(run_ranks(3, skewed_job, 3, word))


def embedding_rows_job(size: int) -> int:
    """Largest tensor while the embedding runs, forward and backward, when one rank owns all rows that are asked for."""
    mesh = Mesh.create(size)
    model = tiny("llama", hidden_size=64)
    inject(model, TSPConfig(size=size), mesh)
    ids = torch.zeros(1, 96, dtype=torch.int64)
    with Largest() as largest:
        model.get_input_embeddings()(ids).sum().backward()
    return largest.numel


@pytest.mark.parametrize("size", [2, 4])
def test_embedding_never_holds_all_tokens(size: int) -> None:
    for numel in run_ranks(size, embedding_rows_job, size):
        assert numel <= max(96 * 64, 53 * 64)  # this rank's tokens, not those of `size` ranks


def logits_job(size: int, rows: int, words: int) -> int:
    """Largest tensor of the loss, forward and backward, in elements."""
    layout.TILE_ELEMENTS = (4096, 4096)
    mesh = Mesh.create(size)
    model = tiny("llama", vocab_size=words, num_hidden_layers=1)
    inject(model, TSPConfig(size=size), mesh)
    with Largest() as largest:
        model(**tokens(1, rows, words)).loss.backward()
    return largest.numel


def test_logits_exist_only_as_tiles() -> None:
    for numel in run_ranks(4, logits_job, 4, 256, 1024):
        assert numel <= 1024 * 24  # a slice of the head, all parameters of it; the local logits alone are 64 * 1024


class OwnLoss:
    """A loss of the user's own, that squares: only whole logits will do."""

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, shift_labels=None, num_items_in_batch=1, **_: Any) -> Tensor:
        targets = shift_labels if shift_labels is not None else F.pad(labels[:, 1:], (0, 1), value=-100)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
        return nll.square().sum() / num_items_in_batch


def own_loss_job(size: int) -> dict[str, float]:
    with fp64_throughout():
        reference = tiny("gemma2").double()
        reference.loss_function = OwnLoss()
        model, mesh = copy.deepcopy(reference), Mesh.create(size)
        inject(model, TSPConfig(size=size), mesh)
        sum_replicated_gradients([p for p in model.parameters() if not hasattr(p, "tsp_cut")], mesh)
        batch = tokens(2, 13)
        valid = (batch["labels"][:, 1:] != -100).sum().item()
        expected, got = reference(**batch, num_items_in_batch=valid).loss, model(**batch).loss
        expected.backward()
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("size", [1, 3])
def test_own_loss_gets_whole_local_logits(size: int) -> None:
    assert_small(run_ranks(size, own_loss_job, size))


def local_logits_job(size: int) -> dict[str, float]:
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", size, tsp={"gather_logits": False})
        ids = tokens(2, 12)["input_ids"]
        part, whole = model(ids).logits, reference(ids).logits
        return {"logits": (part - whole[:, SequenceLayout(12, size).positions(mesh.rank)]).abs().max().item()}


def test_logits_may_stay_local() -> None:
    assert_small(run_ranks(3, local_logits_job, 3))


def refused_job(change: str) -> None:
    model = tiny("llama")
    if change == "max_norm":
        model.get_input_embeddings().max_norm = 1.0
    elif change == "head":
        model.lm_head = nn.Sequential(model.lm_head)
    elif change == "narrow":
        model = tiny("llama", vocab_size=3, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    inject(model, TSPConfig(size=4), Mesh.create(4))
    model.loss_function = lambda logits, labels, **_: logits[:, 0].sum()  # a model that does more than scale its logits
    model(**tokens(2, 12))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ("max_norm", ValueError, r'max_norm=1.0; set "shard_vocab": false'),
        ("head", ValueError, "output layer is a Sequential"),
        ("narrow", ValueError, "a vocabulary of 3 has no row for some of 4 ranks"),
        ("indexing", AttributeError, 'asked its logits for indexing.*"shard_vocab": false'),
    ],
)
def test_refusals_name_the_option(change: str, error: type[Exception], match: str) -> None:
    assert_all_ranks_raise(4, refused_job, change, error=error, match=match)


def sizes_job(size: int) -> tuple[int, int, int]:
    """Elements of this rank's parameters; of the whole model; of the replicated norms. On the meta device."""
    config = AutoConfig.for_model("llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=128256,
                                  num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    mesh = Mesh.create(size)
    cuts = [c for plan in plan_model(model, TSPConfig(size=size), Wire(mesh), Recompute()).values() for c in plan.transport.cut.weights]
    words = model.get_input_embeddings().weight
    cuts.append(WeightCut(tuple(words.shape), 0, cut_bounds(words.shape[0], size)))
    return sum(torch.Size(c.slice_shape(mesh.rank)).numel() for c in cuts) + norms, total, norms


@pytest.mark.parametrize("size", [2, 3, 4])
def test_llama_3_2_1b_shape(size: int) -> None:
    """At most 1/P of the model and the replicated norms, to a row of each matrix where P does not divide."""
    for mine, total, norms in run_ranks(size, sizes_job, size):
        rows = 0 if size != 3 else 16 * 7 * 8192 + 2048
        assert mine <= (total - norms) / size + norms + rows
