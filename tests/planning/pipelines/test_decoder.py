"""Tests the formulas for decoder models against models with published numbers."""

from __future__ import annotations

from typing import Any

import pytest

from chaos_lightning.planning.pipelines.decoder import Decoder, read_model
from chaos_lightning.planning.pipelines.job import JobError

LLAMA = Decoder(layers=32, width=4096, feed_forward=11008, gated=True, vocabulary=32000)
GPT2 = Decoder(layers=12, width=768, heads=12, vocabulary=50257, sequence=1024)
GPT3 = Decoder(layers=96, width=12288, heads=96, vocabulary=51200, sequence=2048, micro_batch=1)
"""Model in the table of arXiv 2205.05198."""


def test_parameters_of_published_models() -> None:
    assert LLAMA.parameters == 6_738_415_616
    # GPT-2's head is its embedding; here it is a copy.
    assert GPT2.parameters - GPT2.vocabulary * GPT2.width == 124_439_808
    large = Decoder(layers=80, width=8192, heads=64, kv_heads=8, feed_forward=28672, gated=True, vocabulary=32000)
    assert large.parameters == 68_976_648_192  # Llama-2 70B
    layers = LLAMA.made()
    assert sum(x.parameter_nbytes for x in layers) == 2 * LLAMA.parameters
    assert sum(x.gradient_nbytes for x in layers) == 4 * LLAMA.parameters
    assert sum(x.optimizer_nbytes for x in layers) == 12 * LLAMA.parameters


@pytest.mark.parametrize("t", [1, 8])
def test_activations_are_those_of_korthikanti_and_others(t: int) -> None:
    """The bytes of activations follow Eqs. 1, 2 and 4 of Korthikanti et al., for a device of t cards."""
    s, b, h, a = GPT3.sequence, GPT3.micro_batch, GPT3.width, GPT3.heads

    def kept(**more: Any) -> int:
        about = {"heads": a, "vocabulary": 51200, "sequence": s, "cards": t, **more}
        return Decoder(layers=4, width=h, **about).made()[1].activation_nbytes

    assert kept(recompute="none") == s * b * h * (34 + 5 * a * s / h)
    assert kept(recompute="none", sequence_parallel=False) == t * s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert kept() == 34 * s * b * h
    assert kept(recompute="full") == 2 * s * b * h


def test_what_is_recomputed_is_there_while_the_layer_computes() -> None:
    whole = Decoder(layers=1, width=1024, recompute="none").made()[1]
    for how in ("selective", "full"):
        layer = Decoder(layers=1, width=1024, recompute=how).made()[1]
        assert layer.activation_nbytes + layer.workspace_nbytes == whole.activation_nbytes
        assert layer.backward_s > whole.backward_s
    assert whole.backward_s == 2 * whole.forward_s
    assert Decoder(layers=1, width=1024, recompute="full").made()[1].backward_s == pytest.approx(3 * whole.forward_s)


def test_a_blocks_time_is_that_of_megatron() -> None:
    """A block's forward pass takes 24 B s h^2 + 4 B s^2 h operations (arXiv 2104.04473, appendix)."""
    h, s, b = 2048, 512, 3
    layer = Decoder(
        layers=2, width=h, sequence=s, micro_batch=b, flops=1e12, efficiency=0.5, cards=4, recompute="none"
    ).made()[1]
    assert layer.forward_s == pytest.approx((24 * b * s * h * h + 4 * b * s * s * h) / 2e12)
    assert layer.backward_input_s == pytest.approx((24 * b * s * h * h + 8 * b * s * s * h) / 2e12)


def test_layers_are_named_and_send_what_the_next_one_reads() -> None:
    layers = Decoder(layers=2, width=128, sequence=16, micro_batch=2).made()
    assert [x.name for x in layers] == ["embedding", "block.0", "block.1", "head"]
    assert [x.output_nbytes for x in layers] == [2 * 2 * 16 * 128] * 3 + [0]


def test_the_short_way_to_say_it() -> None:
    assert read_model("gpt:32,4096") == Decoder(layers=32, width=4096)
    for wrong in ("gpt", "gpt:32", "llama:1,2", "gpt:1,2,3", "gpt:-1,2"):
        with pytest.raises(JobError, match="expected gpt:LAYERS,WIDTH, such as gpt:32,4096"):
            read_model(wrong)
    with pytest.raises(JobError, match="layers is 0; expected"):
        read_model("gpt:0,64")
    with pytest.raises(JobError, match="layers is 5000000; expected a finite number at most 9,998"):
        read_model("gpt:5000000,128")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"heads": 3}, "heads is 3; expected a divisor of the width, 128"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads is 3; expected a divisor of the heads, 4"),
        ({"recompute": "some"}, "recompute is 'some'; expected one of none, selective, full"),
        ({"efficiency": 1.5}, "efficiency is 1.5; expected a share of the peak, at most 1"),
        ({"flops": float("nan")}, "flops is nan; expected a finite number above 0"),
        ({"vocabulary": 0}, "vocabulary is 0; expected a finite number at least 1"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Decoder(layers=1, width=128, **more).made()
