"""A described prompt as token ids, or as a text of exactly as many tokens.

Ids come from all tokens that stand for text. Texts are made of words that are one token each, at a
text's beginning and behind another word: such a text has as many tokens as words, whatever the
tokenizer's merges are, and prompts that share a prefix of words share its tokens.

A tokenizer is a file (GGUF or tokenizer.json), or the server's own ``/tokenize`` (vLLM's form or
llama.cpp's). With neither, common words stand in, and a prompt's length is what the server says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.tools.bench.load.client import Client
from octavo.tools.workload.datasets import Sample, draws

Encode = Callable[[str], list[int]]  # without special tokens

COMMON_TEXT = """
able above across after again air all almost along also always and animal another answer any are
area around ask away back ball base be bear beautiful because become bed been before began begin
behind below best better between big bird black blue boat body book both bottom box boy bring
brought build built but call came can car care carry catch cause center change check children
city class clear close cold color come common complete could country course cover cross cut dark
day decide deep did different direct does dog done door down draw drive dry during each early
earth ease east eat end enough even ever every example eye face fact fall family far farm fast
father feel feet few field figure fill final find fine fire first fish five follow food foot for
force form found four free friend from front full game gave general get girl give go gold good
got great green ground group grow had half hand happen hard has have head hear heard heat help
her here high him his hold home horse hot hour house how hundred idea inch island just keep kind
king knew know land language large last late laugh lead learn leave left less let letter life
light like line list listen little live long look love low machine made main make man many map
mark may mean measure men might mile mind minute miss money moon more morning most mother
mountain move much music must name near need never new next night north note nothing notice now
number object ocean of off often old on once one only open order other our out over own page
paper part pass pattern people person picture piece place plain plan plane plant play point
power press problem produce product question quick rain ran reach read ready real record red
remember rest right river road rock room round rule run said same saw say school science sea
second see seem self sentence serve set several shape she ship short should show side simple
since sing size sleep slow small snow some song soon sound south space special spell stand star
start state stay step still stood stop story street strong study such sun sure surface system
table tail take talk teach tell ten test than that the them then there these they thing think
this those though thought thousand three through time together told too took top toward town
travel tree true try turn two under unit until upon use usual very voice vowel wait walk want
war warm was watch water way week weight well went were west what wheel when where which while
white who whole why will wind with wonder wood word work world would write year young your
"""
COMMON = tuple(COMMON_TEXT.split())


FEWEST_WORDS = 64  # to make texts of


def _count_words(text: str) -> int:
    return len(text.split())


class Tokens(NamedTuple):
    """What is known of a tokenizer: ids that stand for text, words that are one token each (made
    when called for), tokens it puts around a text, and how many it makes of one.
    """

    name: str | None
    ids: Sequence[int]
    words: Callable[[], Sequence[str]]
    special: int
    count: Callable[[str], int]


NO_TOKENS = Tokens(None, (), tuple, 0, _count_words)


class Vocabulary(Protocol):
    """Turns a sample's random draws into what a request carries."""

    def prompt(self, sample: Sample, seed: int) -> list[int] | str: ...


def _drawn(sample: Sample, seed: int) -> npt.NDArray[np.uint32]:
    return np.concatenate([draws(seed, key, length) for key, length in sample.parts])


class Ids:
    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids)

    def prompt(self, sample: Sample, seed: int) -> list[int] | str:
        if sample.text is not None:
            return sample.text
        ids: list[int] = self._ids[_drawn(sample, seed) % len(self._ids)].tolist()
        return ids


class Words:
    """``special``: tokens that the server puts around a text, taken off its length."""

    def __init__(self, words: Sequence[str], special: int = 0) -> None:
        self.words = words
        self._special = special

    def prompt(self, sample: Sample, seed: int) -> list[int] | str:
        if sample.text is not None:
            return sample.text
        drawn = _drawn(sample, seed) % len(self.words)
        return " ".join([self.words[i] for i in drawn[: max(1, len(drawn) - self._special)]])


class LocalTokenizer:
    """From a file. Raises `CheckpointError`, or `ValueError` with what is wrong with it."""

    _text: Callable[[int], str]

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.open("rb").read(4) == b"GGUF":
            from octavo.loader.loader import load

            checkpoint = load(path)
            tokenizer = checkpoint.tokenizer
            checkpoint.release()
            self.encode: Encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
            self.special = len(tokenizer.encode("a")) - len(self.encode("a"))
            self.ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]
            self._text = lambda i: tokenizer.token_bytes(i).decode(errors="replace")
            return
        from tokenizers import Tokenizer

        from octavo.loader.encoder import guarded

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            backend = guarded(Tokenizer.from_file, str(file))
        except ValueError as error:
            raise ValueError(f"{file}: not a tokenizer ({error})") from None
        self.encode = lambda text: list(guarded(backend.encode, text, add_special_tokens=False).ids)
        self.special = backend.num_special_tokens_to_add(is_pair=False)
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.ids = [i for i in range(backend.get_vocab_size()) if i not in special]
        self._text = lambda i: backend.decode([i])

    def tokens(self, name: str) -> Tokens:
        def count(text: str) -> int:
            return len(self.encode(text)) + self.special

        return Tokens(name, self.ids, self.words, self.special, count)

    def words(self, most: int = 4096) -> list[str]:
        """Words of the vocabulary that are one token wherever they stand."""
        texts = dict.fromkeys(self._text(i).strip() for i in self.ids)
        found = []
        for text in texts:
            if len(text) > 2 and text.isascii() and text.isalpha() and text.islower():
                if len(self.encode(text)) == 1 and len(self.encode(f"{text} {text}")) == 2:
                    found.append(text)
                if len(found) == most:
                    break
        return found


class ServerTokenizer:
    """The server's own, by HTTP."""

    def __init__(self, client: Client, path: str, model: str) -> None:
        self._client, self._path, self._model = client, path, model

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Raises `ValueError` where the server has none, `OSError` where it does not answer."""
        for request in (
            {"model": self._model, "prompt": text, "add_special_tokens": special},
            {"content": text, "add_special": special},
        ):
            answer = await self._client.get("POST", self._path, msgspec.json.encode(request))
            if answer.reason:
                raise OSError(f"/tokenize: {answer.reason} {answer.detail}".rstrip())
            if answer.status != 200:
                continue
            try:
                ids = msgspec.json.decode(answer.content, type=_Answer).tokens
            except msgspec.MsgspecError:
                continue
            if ids:
                return ids
        raise ValueError("the server has no /tokenize")

    async def tokens(self) -> Tokens:
        """Words are those of `COMMON` that are one token wherever they stand; ids all they have."""
        plain = await self.encode("the")  # one question before many
        special = len(await self.encode("the", special=True)) - len(plain)
        gate = asyncio.Semaphore(16)

        async def twice(word: str) -> list[int]:
            async with gate:
                return await self.encode(f"{word} {word}")

        found = await asyncio.gather(*(twice(word) for word in COMMON))
        words = [word for word, ids in zip(COMMON, found, strict=True) if len(ids) == 2]
        ids = sorted({token for ids in found for token in ids})
        return Tokens(self._path, ids, lambda: words, special, _count_words)


class _Answer(msgspec.Struct):
    tokens: list[int]
