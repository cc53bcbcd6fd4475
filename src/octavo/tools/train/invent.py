"""Questions that a model invents itself.

Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing",
2024: a model taught to chat, given its template up to where the user speaks, goes on as a user
would. Half of the turns are begun with a word or two, so that there are questions of every kind,
and not mostly of the one that the model has met most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from octavo.engine.engine import Engine
from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import FinishReason, Request

_OPENINGS = (
    "What", "How", "Why", "Write", "Explain", "Describe", "Can you", "Tell me", "Is", "Give me",
    "Who", "Which", "Compare", "When", "Create", "Should", "Suggest", "Summarize", "Where", "List",
)  # fmt: skip
_TOP_P = 0.95  # what a small model draws from the rest is no language
_LONGEST = 80  # tokens
_SPARE = 1.4  # so many are invented for each that is wanted: some are alike, or no questions
_ROUNDS = 5
_ALIKE = 0.7  # of a question's telling words in another one: it asks for the same
_TELLING = 4  # letters
_HERE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for what a user says

Progress = Callable[[int, int], None]


def invented(
    engine: Engine,
    checkpoint: Checkpoint,
    count: int,
    seed: int,
    keep: Callable[[str], bool] = lambda question: True,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Up to ``count`` questions, all different, that pass ``keep``, in an order that one seed
    gives; none of a model whose template does not say where a user speaks. ``progress``: how many
    there are, of how many.
    """
    around = _around(checkpoint)
    if around is None:
        return []
    head, tail = around
    encode = checkpoint.tokenizer.encode
    stops = [ids[0] for ids in [encode(tail, add_special_tokens=False)] if ids]
    stops = [token for token in stops if checkpoint.tokenizer.is_special(token)]
    found: dict[str, str] = {}  # by its words
    asked = 0
    for _ in range(_ROUNDS):
        openings: dict[str, str] = {}
        said: dict[str, str] = {}
        for number in range(asked, asked + int(_SPARE * (count - len(found))) + 1):
            opening = _OPENINGS[number // 2 % len(_OPENINGS)] if number % 2 else ""
            params = SamplingParams(
                temperature=1.0,
                top_p=_TOP_P,
                seed=seed + number,
                max_tokens=_LONGEST,
                stop_token_ids=tuple(stops),
                stop=tuple(tail.strip().splitlines()[:1]),
            )
            prompt = encode(head + opening, add_special_tokens=False)
            request = Request(request_id=str(number), prompt_token_ids=prompt, params=params)
            engine.add_request(engine.check(request))
            openings[request.request_id] = opening
        asked += len(openings)
        while engine.has_work():
            for delta in engine.step():
                name = delta.request_id
                said[name] = said.get(name, openings[name]) + delta.text
                if delta.finish_reason is not FinishReason.STOP:
                    continue
                question = said[name].strip()
                words = " ".join(_words(question))
                if len(found) < count and _asks(question) and words not in found and keep(question):
                    found[words] = question
                    progress(len(found), count)
        if len(found) == count:
            break
    return list(found.values())


def unlike(questions: Iterable[str]) -> Callable[[str], bool]:
    """Whether a question asks for something else than each of those: whoever measures with them
    must not have learned from it. One with seven tenths of another's words of four letters and more
    is taken to ask the same.
    """
    theirs = [(" ".join(_words(each)), _telling(each)) for each in questions]

    def keep(question: str) -> bool:
        words, telling = " ".join(_words(question)), _telling(question)
        return not any(
            words == whole or (some and len(some & telling) >= _ALIKE * len(some))
            for whole, some in theirs
        )

    return keep


def _around(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """What the template puts before a user's words, and behind them."""
    if checkpoint.chat_template is None:
        return None
    whole = checkpoint.chat_template.render(
        [{"role": "user", "content": _HERE}], add_generation_prompt=True
    )
    head, here, tail = whole.partition(_HERE)
    return (head, tail) if here and head.strip() else None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _telling(text: str) -> frozenset[str]:
    return frozenset(word for word in _words(text) if len(word) >= _TELLING)


def _asks(text: str) -> bool:
    """Whether it says something."""
    return len(_words(text)) >= 3 and _HERE not in text and "\N{REPLACEMENT CHARACTER}" not in text
