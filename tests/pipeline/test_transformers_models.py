"""Tests unchanged models of `transformers`, built from a config, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_models import assert_equal, tokens
from torch import nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.checking import check_cut
from chaos_lightning.pipeline.parts import ModelParts, find_parts
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.recording import Recording

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attention_dropout=0.1, **options)
    return transformers.LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def checkpointed() -> nn.Module:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    return model


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).train()  # type: ignore[no-any-return]


def labels(model: Any) -> Callable[[Any], Any]:
    return lambda batch: model(input_ids=batch[0], labels=batch[1]).loss


def padded(model: Any) -> Callable[[Any], Any]:
    mask = torch.ones(3, 16, dtype=torch.long).tril(13)
    return lambda batch: model(input_ids=batch[0], attention_mask=mask, labels=batch[1]).loss


def autocast(model: Any) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=batch[0], labels=batch[1]).loss

    return step


CASES = {
    "llama": (llama, "model.layers", labels),
    "llama, padded": (llama, "model.layers", padded),
    "llama, autocast": (llama, "model.layers", autocast),
    "llama, checkpointed": (checkpointed, "model.layers", labels),
    "gpt2": (gpt2, "transformer.h", labels),
    "bert": (bert, "bert.encoder.layer", padded),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_are_equal_to_the_whole(case: str) -> None:
    build, path, step_for = CASES[case]
    torch.manual_seed(0)
    assert_equal(build(), path, [1, 3], step_for, tokens(), Randomness(1))


def built(build: Callable[[], nn.Module], path: str, layers: range) -> tuple[Any, ModelParts]:
    recording = Recording(7)
    with recording.recorded():
        model = build()
    memory = ModelMemory(model, 7, "cpu", recording)
    chain = LayerChain(model, path, labels(model))
    parts = find_parts(chain, tokens())
    chain.close()
    memory.own([name for part in parts.owned_by(layers) for name in parts.names(part)])
    return model, parts


@pytest.mark.parametrize("case", ["llama", "gpt2", "bert"])
def test_each_member_builds_what_it_owns(case: str) -> None:
    build, path, _ = CASES[case]
    whole, parts = built(build, path, range(4))
    part, _ = built(build, path, range(2, 4))
    for (name, one), (_, other) in zip(whole.state_dict().items(), part.state_dict().items(), strict=True):
        owned = parts.part_of[name] in parts.owned_by([2, 3])
        assert is_absent(other) == (not owned), name
        assert torch.equal(one, other) == owned, name
    torch.manual_seed(0)
    plain = build()
    for (name, one), (_, other) in zip(whole.named_parameters(), plain.named_parameters(), strict=True):
        assert float(one.detach().std()) == pytest.approx(float(other.detach().std()), rel=0.3, abs=1e-6), name
    for (name, one), (_, other) in zip(whole.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    chain = LayerChain(whole, path, labels(whole), randomness=Randomness(1))
    assert check_cut(chain, parts, tokens()) == pytest.approx(4.6, abs=0.5)


def test_a_tied_head_is_shared() -> None:
    _, parts = built(gpt2, "transformer.h", range(1))
    assert parts.users["shared.transformer.wte.weight"] == (0, 3)


def test_losses_of_routers_are_refused_by_the_comparison() -> None:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    chain = LayerChain(model, "model.layers", labels(model))
    with pytest.raises(UnsupportedError, match=r"in 2 stages the step gives something else.*the loss is"):
        check_cut(chain, find_parts(chain, tokens()), tokens(), [2])


def test_a_decoder_that_reads_the_encoder_is_refused_by_name() -> None:
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    chain = LayerChain(model, "decoder.block", labels(model))
    first = chain.run(0, 1, tokens())
    with pytest.raises(UnsupportedError, match=r"an argument of decoder\.block\.1 depends on .*encoder"):
        chain.run(1, 3, tokens(), first.tensors, first.specs)
