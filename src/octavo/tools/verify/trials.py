"""The requests that a certificate tries: texts and sampling parameters of every kind."""

from __future__ import annotations

import random
from typing import NamedTuple

from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams, parameters
from octavo.scheduler.request import Request

COUNT = 16
_LONGEST = 280  # tokens of a prompt, where no window asks for more
_BEYOND_WINDOW = 40
_LONGEST_WINDOW = 1024  # tokens of a window that is still tried

_CODE = '''class Account:
    """Money of one owner, in cents."""

    def __init__(self, owner, cents=0):
        self.owner = owner
        self.cents = cents
        self.history = []

    def deposit(self, cents):
        if cents <= 0:
            raise ValueError("a deposit is more than nothing")
        self.cents += cents
        self.history.append(("deposit", cents))

    def withdraw(self, cents):
        if cents <= 0:
            raise ValueError("a withdrawal is more than nothing")
        if cents > self.cents:
            raise ValueError("the account does not hold so much")
        self.cents -= cents
        self.history.append(("withdraw", cents))
'''
_RIVERS = (
    "The Danube flows through Vienna, Budapest and Belgrade to the Black Sea.\n",
    "The Rhine flows through Basel, Cologne and Rotterdam to the North Sea.\n",
    "The Loire flows through Orleans, Tours and Nantes to the Atlantic.\n",
    "The Vistula flows through Cracow, Warsaw and Torun to the Baltic Sea.\n",
    "The Ebro flows through Logrono and Zaragoza to the Mediterranean.\n",
)
_QUESTIONS = (
    "Why is the sky blue during the day and red in the evening?",
    "How would you explain to a child what money is for?",
    "Which is heavier, a litre of milk or a litre of cream, and why?",
    "Write a short letter to a friend who has moved to another country.",
)


class Trial(NamedTuple):
    """A request to be tried, again and again, under one name."""

    name: str
    prompt_token_ids: list[int]
    params: SamplingParams

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0

    def request(self) -> Request:
        return Request(
            request_id=self.name, prompt_token_ids=self.prompt_token_ids, params=self.params
        )


def trials(checkpoint: Checkpoint, length: int = 16) -> list[Trial]:
    """`COUNT` requests of ``length`` new tokens, or three times as many. Of the prompts a quarter
    each repeat code, repeat a list, ask openly, and are random tokens; some begin alike, and one is
    longer than the model's widest window. Half of the requests are greedy.
    """
    config = checkpoint.config
    room = config.context_length - 3 * length - 1
    windows = [layer.window or 0 for layer in config.layers]
    widest = max((window for window in windows if window <= _LONGEST_WINDOW), default=0)
    rng = random.Random(20)
    made = []
    for index in range(COUNT):
        most = min(room, _LONGEST)
        if index == 1 and widest:
            most = min(room, max(most, widest + _BEYOND_WINDOW))
        ids = _prompt(checkpoint, index, most, rng)
        # Short prompts have the long answers: they grow out of a small pool.
        new = length if index % 4 < 2 else 3 * length
        made.append(Trial(f"trial-{index}", ids, _params(index, new, config.vocab_size)))
    return made


def _prompt(checkpoint: Checkpoint, index: int, most: int, rng: random.Random) -> list[int]:
    encode = checkpoint.tokenizer.encode
    turn, kind = divmod(index, 4)
    vocab = checkpoint.config.vocab_size
    if kind == 3:
        return [rng.randrange(vocab) for _ in range(min(most, (3, 16, 50, 120)[turn]))]
    if kind == 2:
        template = checkpoint.chat_template
        if template is None or turn % 2:
            ids = encode(_QUESTIONS[turn])
        else:
            messages: list[dict[str, object]] = [{"role": "user", "content": _QUESTIONS[turn]}]
            text = template.render(messages, add_generation_prompt=True)
            ids = encode(text, add_special_tokens=False)
    elif kind == 0:
        # The first two begin alike, and so do the others.
        first = "# Version one of two.\n" if turn < 2 else "# Three versions.\n"
        ids = encode(first + (_CODE + "\n") * (2 + most // 150) + "\n" * turn)
    else:
        lines = [_RIVERS[(turn + at) % len(_RIVERS)] for at in range(len(_RIVERS))]
        ids = encode("Rivers:\n" + "".join(lines * (1 + most // 60)))
    if kind < 2:
        # Cut in the middle of what has been said before, each somewhere else.
        most = max(1, most - 23 * turn)
    ids = ids[:most] or [rng.randrange(vocab)]
    return list(ids)


def _params(index: int, length: int, vocab: int) -> SamplingParams:
    """Half of them greedy; every parameter is somebody's."""
    common = {"max_tokens": length, "ignore_eos": True, "logprobs": index % 3, "seed": 7000 + index}
    some = [3 * index % vocab, (50 + index) % vocab]
    turn = index // 4
    match (index + turn) % 4:
        case 0:
            more: dict[str, object] = {"temperature": 0.0}
        case 1:
            more = {"temperature": 0.8, "top_p": 0.95, "n": 1 + turn % 2}
        case 2:
            more = {"temperature": 0.0}
            if turn % 2:
                more |= {"repetition_penalty": 1.1, "logit_bias": {some[0]: 2.0}}
            else:
                more |= {"prompt_logprobs": 1}
        case _:
            more = {"temperature": 1.1}
            more |= (
                {"min_p": 0.05, "presence_penalty": 0.4},
                {"top_k": 20, "frequency_penalty": 0.3},
                {"logit_bias": {some[0]: -5.0}, "banned_token_ids": (some[1],)}
                | {name: row.tried for name, row in parameters().items() if row.tried is not None},
                {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.05},
            )[turn]
    return SamplingParams(**(common | more))  # type: ignore[arg-type]
