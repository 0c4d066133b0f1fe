"""What the soak asks, and the greedy answers that must come back: by plain transformers, in float32, without a cache.

    chat        a long persona, then turns; each turn carries the answers before it
    document    a part of the handbook, then one of several questions

The answers are stored, because computing them takes minutes, and used again while model, texts and libraries are the
same. Where the two best tokens are closer than rounding, the answer is cut: behind that point nothing is promised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixcache.config import load_settings
from prefixcache.model.digest import weights_digest
from prefixcache.model.loader import load_model, locate
from prefixcache.model.tokenizer import ChatMessage, Tokenizer

HANDBOOK = Path(__file__).parents[1] / "examples/handbook.md"
CLEAR_GAP = 1e-3  # of two logits; rounding may decide between tokens that are closer
MAX_TOKENS = 24
PERSONAS = (
    "You are the assistant of a small public library in a town by the sea. Be friendly, be brief, and answer in one "
    "short sentence. Books may be kept for four weeks, films for one. Never promise that a book is on the shelf.",
    "You help the people who run a fleet of buses. Answer with facts, in plain words, and name the unit of every "
    "number. If you are not sure, say so, and send them to the depot, which is open day and night.",
)
CHATS = (
    ("Name three fruits, please.", "Which of them is the sweetest?", "Write one sentence about it."),
    ("When do you open?", "And on Saturdays?", "Thank you. How long may I keep a film?"),
    ("What is the capital of France?", "Which river runs through it?", "How long is that river?"),
)
QUESTIONS = (
    "What is this text about?",
    "Which number in the text matters most?",
    "Who should read this?",
    "Sum it up in one sentence.",
)
NUM_DOCUMENTS = 4


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        answer: The tokens that the reply must begin with.
        is_whole: Whether the reply must end there, too.
    """

    prompt: list[int]
    answer: list[int]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Thread:
    """Questions that one client asks one after the other: the turns of a chat, or all about one document."""

    kind: str
    questions: list[Question]


def stored_threads(
    model: str | None, document_tokens: int, folder: Path, progress: Callable[[str], None]
) -> list[Thread]:
    """Returns everything that can be asked; computes the answers if `folder` doesn't hold them."""
    cache_dir = load_settings().cache_dir
    loaded = load_model(model, torch.float32, torch.device("cpu"), cache_dir, progress)
    sources = [repr((PERSONAS, CHATS, QUESTIONS, NUM_DOCUMENTS, MAX_TOKENS, CLEAR_GAP)), HANDBOOK.read_text()]
    sources += [str(document_tokens)]
    sources += [torch.__version__, torch.backends.cpu.get_cpu_capability(), transformers.__version__]
    sources += [weights_digest(loaded.state_dict).hex(), loaded.tokenizer.digest().hex()]
    key = hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]
    path = folder / f"soak-answers-{key}.json"
    if not path.exists():
        progress("Computing the answers with plain transformers, once")
        source = locate(model, cache_dir, progress)[1]
        plain: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        writer = _AnswerWriter(plain.eval(), loaded.tokenizer)
        threads = [*writer.chats(), *writer.documents(document_tokens)]
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(thread) for thread in threads]))
    return [
        Thread(thread["kind"], [Question(**question) for question in thread["questions"]])
        for thread in json.loads(path.read_text())
    ]


class _AnswerWriter:
    """Answers questions greedily, one token after the other."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def chats(self) -> Iterator[Thread]:
        for persona in PERSONAS:
            for turns in CHATS:
                messages, questions = [ChatMessage("system", persona)], []
                for turn in turns:
                    messages.append(ChatMessage("user", turn))
                    questions.append(self._ask(self._tokenizer.encode_chat(messages)))
                    text = self._tokenizer.decode(questions[-1].answer, skip_special_tokens=True)
                    messages.append(ChatMessage("assistant", text))
                yield Thread("chat", questions)

    def documents(self, num_tokens: int) -> Iterator[Thread]:
        tokens = self._tokenizer.encode(HANDBOOK.read_text())
        for index in range(NUM_DOCUMENTS):
            text = self._tokenizer.decode(
                tokens[index * num_tokens : (index + 1) * num_tokens], skip_special_tokens=True
            )
            prompts = [
                self._tokenizer.encode_chat([ChatMessage("user", f"{text}\n\n{question}")]) for question in QUESTIONS
            ]
            yield Thread("document", [self._ask(prompt) for prompt in prompts])

    @torch.inference_mode()
    def _ask(self, prompt: list[int]) -> Question:
        answer: list[int] = []
        new, past = prompt, None
        while len(answer) < MAX_TOKENS:
            output = self._model(torch.tensor([new]), cache=past, use_cache=True, logits_to_keep=1)
            (first, second), (best, _) = output.logits[0, -1].topk(2)
            if float(first - second) < CLEAR_GAP:
                return Question(prompt, answer, is_whole=False)
            answer.append(int(best))
            if answer[-1] in self._tokenizer.eos_token_ids:
                break
            new, past = answer[-1:], output.cache
        return Question(prompt, answer, is_whole=True)
