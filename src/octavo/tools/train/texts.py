"""What a model says to prompts, with the hidden rows that it said it from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.config import SettingsError
from octavo.engine.engine import Engine, Step
from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request, RequestRecord

_TEMPERATURE = 0.7  # of each fourth answer; the others are greedy
_EVERY = 4


class Texts(NamedTuple):
    """Answers one after another, N entries: each a token, the hidden row [width] that the token
    behind it was drawn from, and how many tokens of the answer follow. An answer's first entry is
    its prompt's last token, and its last one has no hidden row: zeros.
    """

    tokens: npt.NDArray[np.int32]  # [N]
    hidden: npt.NDArray[np.float16]  # [N, width]
    left: npt.NDArray[np.int32]  # [N]

    @property
    def num_answers(self) -> int:
        return int((self.left == 0).sum())

    @property
    def drawn(self) -> npt.NDArray[np.int32]:
        """The answers' own tokens."""
        follows = np.zeros(len(self.tokens), np.bool_)
        follows[1:] = self.left[:-1] > 0
        return self.tokens[follows]

    def split(self, every: int) -> tuple[Texts, Texts]:
        """All answers but each ``every``th, and those; of fewer answers, the last is kept out."""
        behind = np.cumsum(self.left == 0) - (self.left == 0)  # the answer's number, from 0
        out = behind % every == every - 1
        if not out.any():
            out = behind == behind[-1]
        return self._chosen(~out), self._chosen(out)

    def _chosen(self, which: npt.NDArray[np.bool_]) -> Texts:
        return Texts(self.tokens[which], self.hidden[which], self.left[which])


def lines_of(text: str) -> list[str]:
    """Those that say something, each once: an answer that is measured on must not have been learned
    from.
    """
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def spread(lines: Sequence[str], count: int) -> list[str]:
    """Up to ``count`` of them, from all over."""
    if len(lines) <= count:
        return list(lines)
    return [lines[i * len(lines) // count] for i in range(count)]


def as_prompts(checkpoint: Checkpoint, lines: Iterable[str]) -> list[list[int]]:
    """Token ids, all different. A model with a chat template is asked them, another one goes on
    with them. Raises `SettingsError`.
    """
    encode, template = checkpoint.tokenizer.encode, checkpoint.chat_template
    try:
        if template is None:
            found = [encode(line) for line in lines]
        else:
            asked = [
                template.render([{"role": "user", "content": line}], add_generation_prompt=True)
                for line in lines
            ]
            found = [encode(line, add_special_tokens=False) for line in asked]
    except ValueError as error:
        raise SettingsError(f"the prompts cannot be tokenized: {error}") from None
    return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]


class _Answer:
    __slots__ = ("hidden", "tokens")

    def __init__(self, last: int) -> None:
        self.tokens = [last]
        self.hidden: list[npt.NDArray[np.float16]] = []


class _Listener:
    """Takes down every sample's token and hidden row."""

    def __init__(self) -> None:
        self.answers: dict[str, _Answer] = {}

    def on_step(self, step: Step) -> None:
        hidden = step.result.hidden
        assert hidden is not None
        scheduled = step.scheduled
        for seq, row, run in zip(
            scheduled.samples, scheduled.sample_rows, step.drawn.runs, strict=True
        ):
            if not run:
                continue
            answer = self.answers[seq.owner.request_id]
            answer.hidden.append(hidden[row].astype(np.float16))
            answer.tokens.append(run[0])

    def on_end(self, record: RequestRecord) -> None:
        pass


def listen(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[Texts, list[str]]:
    """The engine's answers, of up to ``max_tokens`` tokens: most of them greedy, each fourth
    sampled; and why prompts were left out, a reason for each that the engine cannot take. The
    engine keeps hidden rows and does not speculate. ``progress``: answers finished, of how many.
    Raises `SettingsError` if there is no answer.
    """
    listener = _Listener()
    engine.observers.append(listener)
    waiting: list[Request] = []
    refused: list[str] = []
    for index, prompt in enumerate(prompts):
        sampled = index % _EVERY == _EVERY - 1
        params = SamplingParams(
            temperature=_TEMPERATURE if sampled else 0.0,
            seed=seed + index,
            max_tokens=max_tokens,
        )
        request = Request(request_id=str(index), prompt_token_ids=prompt, params=params)
        try:
            waiting.append(engine.check(request))
        except ValueError as error:
            refused.append(str(error))
            continue
        listener.answers[request.request_id] = _Answer(prompt[-1])
    total, done = len(waiting), 0
    for request in waiting:
        engine.add_request(request)
    while engine.has_work():
        finished = sum(delta.record is not None for delta in engine.step())
        if finished:
            done += finished
            progress(done, total)
    engine.observers.remove(listener)
    answers = [answer for answer in listener.answers.values() if answer.hidden]
    if not answers:
        why = f" and takes none of the prompts: {refused[0]}" if refused else ""
        raise SettingsError(f"there is nothing to train with: the model gave no answer{why}")
    return _joined(answers), refused


def _joined(answers: Sequence[_Answer]) -> Texts:
    sizes = np.array([len(answer.tokens) for answer in answers])
    ends = np.cumsum(sizes)
    tokens = np.concatenate([np.array(answer.tokens, np.int32) for answer in answers])
    width = len(answers[0].hidden[0])
    hidden = np.zeros((len(tokens), width), np.float16)
    for answer, end, size in zip(answers, ends, sizes, strict=True):
        hidden[end - size : end - 1] = answer.hidden
    left = np.repeat(ends, sizes) - 1 - np.arange(len(tokens))
    return Texts(tokens, hidden, left.astype(np.int32))
