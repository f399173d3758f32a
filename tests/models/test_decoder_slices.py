"""Any slicing of a packed row equals Hugging Face's own forward, sample by sample."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.decoder import VERIFIED_FAMILIES, DecoderLlm
from lightning_entrain.models.packed_attention import PACKED_ATTENTION
from lightning_entrain.models.protocol import LlmPacking

from .helpers import relative

LAYERS = 4
VOCAB = 64
IMAGE = 63
LENGTHS = (5, 1, 1, 23, 9)
CUTS = [
    (0, *inner, LAYERS)
    for size in range(LAYERS)
    for inner in itertools.combinations(range(1, LAYERS), size)
]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
EXTRA = {
    "qwen2": {**SLIDING, "use_sliding_window": True},
    "qwen3": {**SLIDING, "use_sliding_window": True, "head_dim": 8},
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {**SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}


def make_model(family: str = "llama", attention: str | None = None, **fields):
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"tie_word_embeddings": False, **EXTRA.get(family, {}), **fields},
    )
    options = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_config(config, **options)


def run_slices(llm, packing, cuts, *, input_ids, features=None):
    hidden = features
    for start, stop in itertools.pairwise(cuts):
        ids = input_ids if start == 0 else None
        hidden = llm.forward_stage(hidden, packing, start=start, stop=stop, input_ids=ids)
    return hidden


def one_by_one(model, input_ids, lengths):
    """Logits of Hugging Face's own forward, each sample on its own."""
    rows = [model(row[None], use_cache=False).logits[0] for row in input_ids.split(list(lengths))]
    return torch.cat(rows)


@pytest.mark.parametrize("family", sorted(VERIFIED_FAMILIES))
def test_every_slicing_of_every_family(family):
    model = make_model(family)
    input_ids = torch.randint(3, IMAGE, (sum(LENGTHS),))
    expected = one_by_one(model, input_ids, LENGTHS)
    llm = DecoderLlm(model, image_token_id=IMAGE)
    for cuts in CUTS:
        found = run_slices(llm, LlmPacking(LENGTHS), cuts, input_ids=input_ids)
        assert relative(found, expected) < 2e-6, cuts


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_eager_masks_keep_samples_apart(family):
    model = make_model(family, "eager")
    input_ids = torch.randint(3, IMAGE, (sum(LENGTHS),))
    expected = one_by_one(model, input_ids, LENGTHS)
    llm = DecoderLlm(model, image_token_id=IMAGE)
    found = run_slices(llm, LlmPacking(LENGTHS), (0, 1, 4), input_ids=input_ids)
    assert llm.config._attn_implementation == "eager"
    assert relative(found, expected) < 2e-6


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_hugging_face_sdpa_masks_keep_samples_apart(family):
    model = make_model(family)
    input_ids = torch.randint(3, IMAGE, (sum(LENGTHS),))
    expected = one_by_one(model, input_ids, LENGTHS)
    llm = DecoderLlm(model, image_token_id=IMAGE)
    assert llm.config._attn_implementation == PACKED_ATTENTION
    llm.config._attn_implementation = "sdpa"
    found = run_slices(llm, LlmPacking(LENGTHS), (0, 1, 4), input_ids=input_ids)
    assert relative(found, expected) < 2e-6


def test_one_sample_does_not_reach_another():
    llm = DecoderLlm(make_model(), image_token_id=IMAGE)
    input_ids = torch.randint(3, IMAGE, (12,))
    changed = input_ids.clone()
    changed[:5] = (changed[:5] + 1 - 3) % 60 + 3
    packing = LlmPacking((5, 7))
    before = run_slices(llm, packing, (0, 2, 4), input_ids=input_ids)
    after = run_slices(llm, packing, (0, 2, 4), input_ids=changed)
    assert torch.equal(before[5:], after[5:])
    assert not torch.allclose(before[:5], after[:5])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_whole(family, checkpointing):
    model = make_model(family)
    input_ids = torch.randint(3, IMAGE, (sum(LENGTHS),))
    weight = torch.randn(sum(LENGTHS), VOCAB)
    (one_by_one(model, input_ids, LENGTHS) * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    llm = DecoderLlm(model, image_token_id=IMAGE).train()
    found = run_slices(llm, LlmPacking(LENGTHS), (0, 1, 3, 4), input_ids=input_ids)
    (found * weight).sum().backward()
    for name, parameter in llm.named_parameters():
        assert relative(parameter.grad, expected[name]) < 2e-5, name


@pytest.mark.parametrize("image_token_id", [IMAGE, 0, VOCAB + 5])
def test_features_replace_placeholders_and_get_gradients(image_token_id):
    model = make_model()
    llm = DecoderLlm(model, image_token_id=image_token_id)
    input_ids = torch.randint(3, IMAGE, (12,))
    places = torch.tensor([0, 1, 7])
    features = torch.randn(3, 32, requires_grad=True)
    embeds = model.model.embed_tokens(input_ids).detach()
    embeds[places] = features.detach()
    embeds.requires_grad_()
    input_ids[places] = image_token_id
    packing = LlmPacking((12,))
    found = run_slices(llm, packing, (0, 2, 4), input_ids=input_ids, features=features)
    expected = model(inputs_embeds=embeds[None], use_cache=False).logits[0]
    assert relative(found, expected) < 1e-6
    found.square().sum().backward()
    expected.square().sum().backward()
    assert relative(features.grad, embeds.grad[places]) < 1e-5


@pytest.mark.parametrize("features", [None, torch.zeros(0, 32)])
def test_no_image(features):
    llm = DecoderLlm(make_model(), image_token_id=IMAGE)
    input_ids = torch.randint(3, IMAGE, (6,))
    found = run_slices(llm, LlmPacking((2, 4)), (0, 4), input_ids=input_ids, features=features)
    assert relative(found, one_by_one(llm.hugging_face_model, input_ids, (2, 4))) < 2e-6


@pytest.mark.parametrize("num_features", [0, 1, 3])
def test_placeholders_without_features_and_the_reverse(num_features):
    llm = DecoderLlm(make_model(), image_token_id=IMAGE)
    input_ids = torch.tensor([5, IMAGE, IMAGE, 4])
    with pytest.raises(RuntimeMismatchError, match=f"2 image.*for {num_features} vision"):
        llm.forward_stage(
            torch.zeros(num_features, 32), LlmPacking((4,)), start=0, stop=1, input_ids=input_ids
        )


def test_rows_that_do_not_fit_the_packing():
    llm = DecoderLlm(make_model(), image_token_id=IMAGE)
    with pytest.raises(RuntimeMismatchError, match=r"got 5 tokens.*4 tokens"):
        llm.forward_stage(torch.zeros(5, 32), LlmPacking((4,)), start=1, stop=2)
    with pytest.raises(RuntimeMismatchError, match="no token ids"):
        llm.forward_stage(None, LlmPacking((4,)), start=0, stop=2)


def test_tied_parameters():
    tied = DecoderLlm(make_model(tie_word_embeddings=True), image_token_id=IMAGE)
    assert tied.tied_parameters() == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert DecoderLlm(make_model(), image_token_id=IMAGE).tied_parameters() == ()


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match=r"dropout 0\.1 in .*attention_dropout"):
        DecoderLlm(make_model(attention_dropout=0.1), image_token_id=IMAGE)


def test_unverified_families_and_other_structures_are_refused():
    model = make_model("granite", embedding_multiplier=3.0)
    with pytest.raises(ConfigError, match="'granite'"):
        DecoderLlm(model, image_token_id=IMAGE)
    DecoderLlm(model, image_token_id=IMAGE, allow_unverified=True)
    gpt = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=8)
    )
    with pytest.raises(ConfigError, match="without embed_tokens"):
        DecoderLlm(gpt, image_token_id=0)


def test_names_and_generation_stay_hugging_face():
    model = make_model()
    names = list(model.state_dict())
    prompt = torch.randint(3, IMAGE, (2, 7))
    padding = torch.ones_like(prompt)
    padding[0, :3] = 0
    options = {
        "attention_mask": padding,
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = model.generate(prompt, **options)
    llm = DecoderLlm(model, image_token_id=IMAGE)
    assert list(llm.state_dict()) == names
    assert torch.equal(llm.hugging_face_model.generate(prompt, **options), expected)
