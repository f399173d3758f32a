"""Names are a partition over stages, and a pruned model runs its stages as the whole one does."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.projector import MlpProjector
from lightning_entrain.models.protocol import EncoderPacking, LlmPacking
from lightning_entrain.models.prune import owned_names, prune_to_stages
from lightning_entrain.models.tiny import nano_vlm, tiny_vlm

ENCODER_LAYERS, LLM_LAYERS = 3, 4
PACKING = EncoderPacking(((1, 6, 4), (1, 10, 12)))
LENGTHS = LlmPacking((12, 36, 4))


def make_model(projector: bool) -> EntrainModel:
    made = nano_vlm(encoder_layers=ENCODER_LAYERS, llm_layers=LLM_LAYERS)
    return EntrainModel(made.encoder, made.llm, MlpProjector(24, 24) if projector else None)


MODELS = {projector: make_model(projector) for projector in (False, True)}


def cuts(num_layers: int):
    return st.sets(st.integers(1, num_layers - 1)).map(
        lambda inner: list(pairwise([0, *sorted(inner), num_layers]))
    )


@st.composite
def layouts(draw):
    """Each stage of both modules on one of a few ranks."""
    encoder, llm = draw(cuts(ENCODER_LAYERS)), draw(cuts(LLM_LAYERS))
    ranks = [([], []) for _ in range(draw(st.integers(1, 4)))]
    for side, stages in enumerate((encoder, llm)):
        for stage in stages:
            ranks[draw(st.integers(0, len(ranks) - 1))][side].append(stage)
    return ranks


@settings(max_examples=80, deadline=None)
@given(projector=st.booleans(), ranks=layouts())
def test_names_are_a_partition_and_what_remains_is_what_is_owned(projector, ranks):
    model = MODELS[projector]
    everything = list(model.state_dict())
    owned = [owned_names(model, *ranges) for ranges in ranks]
    assert sorted(name for names in owned for name in names) == sorted(everything)
    rank = copy.deepcopy(model)
    prune_to_stages(rank, *ranks[0])
    assert set(rank.state_dict()) == owned[0]
    assert {name for name, _ in rank.named_parameters()} == owned[0]


@pytest.mark.parametrize("projector", [False, True])
def test_pruned_stages_run_as_the_whole_model(projector):
    model = MODELS[projector]
    pixels = torch.randn(PACKING.num_patches, model.encoder.patch_dim)
    input_ids = torch.randint(4, 200, (LENGTHS.num_tokens,))
    input_ids[:6] = 0
    input_ids[12:42] = 0
    encoder, llm = list(pairwise((0, 1, 3))), list(pairwise((0, 1, 2, 4)))
    ranks = [([encoder[0]], [llm[2]]), ([encoder[1]], [llm[0]]), ([], [llm[1]])]
    pruned = [copy.deepcopy(model) for _ in ranks]
    for rank, ranges in zip(pruned, ranks, strict=True):
        prune_to_stages(rank, *ranges)

    def run(encoder_ranks, llm_ranks):
        hidden = pixels
        for rank, (start, stop) in zip(encoder_ranks, encoder, strict=True):
            hidden = rank.encoder_stage(hidden, PACKING, start=start, stop=stop)
        for rank, (start, stop) in zip(llm_ranks, llm, strict=True):
            ids = input_ids if start == 0 else None
            hidden = rank.llm_stage(hidden, LENGTHS, start=start, stop=stop, input_ids=ids)
        return hidden

    found = run((pruned[0], pruned[1]), (pruned[1], pruned[2], pruned[0]))
    expected = run((model, model), (model, model, model))
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    found.square().sum().backward()
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        (owner,) = [rank for rank in pruned if name in rank.state_dict()]
        assert torch.equal(owner.get_parameter(name).grad, gradient), name


def test_pruning_leaves_no_second_reference():
    model = make_model(False)
    prune_to_stages(model, [], [(0, 1)])
    for module in (model.encoder.hugging_face_model, model.llm.hugging_face_model):
        held = {id(p) for p in module.parameters()}
        assert held <= {id(p) for p in model.parameters()}


def test_state_of_a_stage_loads_into_the_whole_model():
    model = make_model(True)
    rank = copy.deepcopy(model)
    prune_to_stages(rank, [(2, 3)], [(0, 1)])
    report = model.load_state_dict(rank.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert "projector.linear_in.weight" in rank.state_dict()


def test_tied_parameters_are_reported_and_listed_twice():
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_entrain.models.decoder import DecoderLlm

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    llm = DecoderLlm(LlamaForCausalLM(config), image_token_id=0)
    model = EntrainModel(nano_vlm().encoder, llm)
    pair = ("llm.model.embed_tokens.weight", "llm.lm_head.weight")
    assert model.tied_parameters() == (pair,)
    assert set(pair) <= owned_names(model, [], [(0, 2)])
    assert tiny_vlm().tied_parameters() == ()


def test_layer_1_is_not_layer_10():
    model = nano_vlm(encoder_layers=11, llm_layers=12)
    owned = owned_names(model, [(1, 2)], [(1, 2)])
    assert {name.split("layers.")[-1].split("blocks.")[-1].split(".")[0] for name in owned} == {"1"}


def test_ranges_outside_the_layers():
    with pytest.raises(ConfigError, match=r"\[2, 5\)"):
        prune_to_stages(make_model(False), [], [(2, 5)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e, "stray", nn.Parameter(torch.zeros(1))), "stray has no owner"),
        (lambda e: e.register_buffer("table", torch.zeros(1)), "table has no owner"),
        (lambda e: setattr(e, "epilogue_names", lambda: ("head",)), "head does not exist"),
        (lambda e: setattr(e, "prologue_names", lambda: ("merger",)), "given twice"),
        (lambda e: setattr(e, "epilogue_names", lambda: ("blocks",)), "within blocks"),
        (lambda e: setattr(e, "layer_names", lambda: ("blocks.0",)), "1 layer names for 3"),
    ],
)
def test_modules_that_cannot_be_cut_are_refused(change, message):
    made = nano_vlm()
    change(made.encoder)
    with pytest.raises(ConfigError) as caught:
        EntrainModel(made.encoder, made.llm)
    assert message in str(caught.value)


def test_buffers_outside_checkpoints_may_lie_anywhere():
    made = nano_vlm()
    made.encoder.register_buffer("table", torch.zeros(1), persistent=False)
    EntrainModel(made.encoder, made.llm)
