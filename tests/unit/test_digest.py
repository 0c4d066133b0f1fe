import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CompiledTokenizer
from transformers import PreTrainedTokenizerFast

from prefixcache.model import digest
from prefixcache.model.digest import tokenizer_digest, weights_digest
from prefixcache.model.tokenizer import Tokenizer


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(32, 8, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, 16, generator=generator).bfloat16(),
        "model.norm.weight": torch.tensor([1.0, float("nan"), -0.0]),
        "scale": torch.tensor(2.0),
        "empty": torch.empty(0, 4),
    }


def test_the_order_and_the_memory_layout_of_weights_do_not_count() -> None:
    reference = weights_digest(weights())
    assert len(reference) == 32
    assert weights_digest(dict(reversed(weights().items()))) == reference
    transposed = {
        name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in weights().items()
    }
    assert weights_digest(transposed) == reference


def test_weights_are_read_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = weights_digest(weights())
    monkeypatch.setattr(digest, "PIECE_BYTES", 100)
    assert weights_digest(weights()) == reference


@pytest.mark.parametrize("name", list(weights()))
def test_every_weight_counts_with_its_name_type_and_shape(name: str) -> None:
    reference, changed = weights_digest(weights()), weights()
    tensor = changed.pop(name)
    seen = {
        reference,
        weights_digest(changed),
        weights_digest({**changed, name + "s": tensor}),
        weights_digest({**changed, name: tensor.unsqueeze(0)}),
        weights_digest({**changed, name: tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)}),
    }
    assert len(seen) == 5


def test_every_bit_of_every_weight_counts() -> None:
    reference = weights_digest(weights())
    for name, tensor in weights().items():
        raw = tensor.reshape(-1).view(torch.uint8)
        for position in {0, raw.numel() // 2, raw.numel() - 1} if raw.numel() else set():
            flipped = raw.clone()
            flipped[position] ^= 1
            changed = flipped.view(tensor.dtype).reshape(tensor.shape)
            assert weights_digest({**weights(), name: changed}) != reference


def test_two_weights_that_swap_places_count() -> None:
    a, b = torch.ones(4), torch.zeros(4)
    assert weights_digest({"a": a, "b": b}) != weights_digest({"a": b, "b": a})


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate(["<s>", "</s>", *alphabet, "th", "the"])}
    backend = CompiledTokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def test_equal_tokenizers_have_one_digest_however_they_were_called() -> None:
    reference = tokenizer_digest(tokenizer())
    used = tokenizer()
    used(["the", "the the"], truncation=True, max_length=2, padding=True)
    assert tokenizer_digest(used) == reference
    Tokenizer(used, vocab_size=300, eos_token_ids=frozenset({1}))
    assert tokenizer_digest(used) == reference


def test_a_token_more_or_another_rule_changes_the_digest() -> None:
    longer, other = tokenizer(), tokenizer()
    longer.add_tokens([AddedToken("<think>")])
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert len({tokenizer_digest(t) for t in (tokenizer(), longer, other)}) == 3
