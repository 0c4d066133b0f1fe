"""Whose K/V it is: what another model, another setting or another namespace has stored is never used."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from prefixcache.request import DEFAULT_NAMESPACE, Namespace, Tier
from tests.equivalence.conftest import StoreSettings
from tests.support.checks import assert_exact
from tests.support.in_process import Stream, greedy
from tests.support.models import tiny_model
from tests.support.oracle import Oracle
from tests.support.prompts import Prompts
from tests.support.tiers import TieredService, cached_by_tier, changed_model

FAMILY = "llama-gqa"
PROMPT = Prompts(40).tokens(83)


@dataclass(frozen=True)
class Server:
    """What a server runs with."""

    model: PreTrainedModel
    dtype: torch.dtype = torch.float32
    namespace: Namespace = DEFAULT_NAMESPACE

    def ask(self, store: StoreSettings) -> Stream:
        """The prompt's reply in one life of the server, held to the model's oracle where the dtype allows that."""
        with TieredService(self.model, dtype=self.dtype, **store[1]) as service:
            stream = service.run_one(greedy(PROMPT, 6, namespace=self.namespace))
        if self.dtype is torch.float32:
            assert_exact(stream, Oracle(self.model))
        return stream


def other_weights(model: PreTrainedModel) -> None:
    weight = dict(model.named_parameters())["model.layers.1.self_attn.k_proj.weight"]
    weight.copy_(weight.roll(1, 0))


def one_other_bit(model: PreTrainedModel) -> None:
    weight = dict(model.named_parameters())["model.layers.3.mlp.down_proj.weight"]
    weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(9.0))


def other_rope(theta: float, **settings: float | str) -> PreTrainedModel:
    """The family's weights under another RoPE."""
    plain = tiny_model(FAMILY)
    rope = {"rope_type": "default", "rope_theta": theta, **settings}
    config = type(plain.config)(**plain.config.to_dict() | {"rope_parameters": rope})
    config._attn_implementation = "eager"
    model = type(plain)(config).eval().requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    return model


FIRST = Server(tiny_model(FAMILY))
OTHERS = {
    "weights": Server(changed_model(FAMILY, other_weights)),
    "one bit of the weights": Server(changed_model(FAMILY, one_other_bit)),
    "RoPE base": Server(other_rope(500_000.0)),
    "RoPE scaling": Server(other_rope(10_000.0, rope_type="linear", factor=2.0)),
    "dtype": Server(tiny_model(FAMILY), dtype=torch.bfloat16),
    "salt": Server(tiny_model(FAMILY), namespace=Namespace("", "pepper")),
    "tenant": Server(tiny_model(FAMILY), namespace=Namespace("pepper", "")),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_nothing_of_another_is_used_and_ones_own_is_found_again(other: Server, store: StoreSettings) -> None:
    tier = store[0]

    assert cached_by_tier(FIRST.ask(store)) == {}
    strange = other.ask(store)
    back = FIRST.ask(store)
    again = other.ask(store)

    assert cached_by_tier(strange) == {}
    assert cached_by_tier(back) == cached_by_tier(again) == {tier: 80}
    assert again.token_ids == strange.token_ids


@pytest.mark.parametrize("other", [Namespace("", "pepper"), Namespace("pepper", "")])
def test_the_same_tokens_in_another_namespace_are_not_in_host_memory(other: Namespace) -> None:
    with TieredService(FAMILY, num_pages=8, host_memory=4 * 2**20) as service:
        for namespace in (Namespace(), other):
            stream = service.run_one(greedy(PROMPT, 2, namespace=namespace))
            assert cached_by_tier(stream) == {}
            assert_exact(stream, Oracle(tiny_model(FAMILY)))
            service.run_one(greedy(Prompts(41).tokens(110), 2))  # takes every page of the device
        for namespace in (Namespace(), other):
            stream = service.run_one(greedy(PROMPT, 2, namespace=namespace))
            assert cached_by_tier(stream) == {Tier.HOST: 80}
            service.run_one(greedy(Prompts(42).tokens(110), 2))
