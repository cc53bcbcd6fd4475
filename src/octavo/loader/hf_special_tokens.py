"""Which tokens a Hugging Face folder adds to its vocabulary, and which of them have a part to play.

Several files may say so: tokenizer.json (``added_tokens``), tokenizer_config.json
(``added_tokens_decoder``, ``extra_special_tokens``, ``bos_token`` and the like), and the older
special_tokens_map.json and added_tokens.json. The order in which they override each other is that
of `AutoTokenizer` of transformers 5.24 (tokenization_utils_base.py and
tokenization_utils_tokenizers.py there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.loader.hf_folder import HfFolder

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MAX_ADDED = 100_000  # tokens; the largest known vocabularies add 6,400

# The parts that every tokenizer has, in the order in which missing tokens get their ids.
STANDARD = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Token = str | AddedToken


@dataclass
class SpecialTokens:
    """``named`` gives tokens a part, ``extra`` lists more special ones, and ``added`` are added
    tokens by the id that the files claim for them."""

    named: dict[str, Token]
    extra: list[Token]
    added: dict[int, AddedToken]

    @property
    def texts(self) -> dict[str, str]:
        """The named tokens as a chat template sees them."""
        return {key: text_of(token) for key, token in self.named.items()}

    def add_to(self, backend: Tokenizer) -> None:
        """Add the tokens, or their flags where the backend has them. A new token gets the next free
        id, whatever a file claims."""
        tokens: list[Token] = [token for _, token in sorted(self.added.items())]
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        known |= {text_of(token) for token in tokens}
        for token in (*self.named.values(), *self.extra):
            if text_of(token) not in known and token not in tokens:
                tokens.append(token)
        named = set(self.texts.values())
        backend.add_tokens([_as_added(token, named) for token in tokens])


def read_special_tokens(
    folder: HfFolder, tokenizer: dict[str, Any], defaults: Mapping[str, str | None]
) -> SpecialTokens:
    """``tokenizer`` is tokenizer.json without its model; ``defaults`` names the tokens of a
    tokenizer class. Raises `CheckpointError` naming the file and the key at fault."""
    return _Reader(folder, tokenizer, defaults).read()


def text_of(token: Token) -> str:
    return token if isinstance(token, str) else str(token.content)


def control_ids(backend: Tokenizer) -> set[int]:
    """The added tokens that stand for no text: those that the library leaves out of a text.

    Takes the backend's decoder away, which might be anything and is used nowhere else.
    """
    backend.decoder = None
    return {
        token_id
        for token_id in backend.get_added_tokens_decoder()
        if not backend.decode([token_id], skip_special_tokens=True)
    }


def _as_added(token: Token, named: set[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.special or token.content not in named:
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


class _Reader:
    def __init__(
        self, folder: HfFolder, tokenizer: dict[str, Any], defaults: Mapping[str, str | None]
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.defaults = dict(defaults)
        padding = tokenizer.get("padding")
        if isinstance(padding, dict) and isinstance(padding.get("pad_token"), str):
            self.defaults.setdefault("pad_token", padding["pad_token"])
        self.given = folder.json_if_any(TOKENIZER_CONFIG)
        self.where = dict.fromkeys(self.given, TOKENIZER_CONFIG)

    def read(self) -> SpecialTokens:
        given = self.given
        listed = given.get("added_tokens_decoder")
        if _ADDITIONAL in given and not given.get(_EXTRA):
            given[_EXTRA] = given.pop(_ADDITIONAL)
        # Beside the standard parts a file may make up others.
        made_up = {
            key: given.pop(key)
            for key, value in list(given.items())
            if key.endswith("_token") and key not in STANDARD and isinstance(value, str)
        }
        if listed is None:
            self.add_old_spellings()
        if isinstance(given.get(_EXTRA), dict):
            made_up |= given.pop(_EXTRA)
        added = self.listed(listed) if listed is not None else self.unlisted()
        if _ADDITIONAL in given and _EXTRA not in given:
            given[_EXTRA], self.where[_EXTRA] = given[_ADDITIONAL], self.where[_ADDITIONAL]
        extra = self.extra()
        if len(added) + len(extra) > MAX_ADDED:
            file = TOKENIZER if listed is None else TOKENIZER_CONFIG
            self.folder.fail(
                file, f"{len(added) + len(extra)} tokens are added, more than {MAX_ADDED}"
            )
        # A part is played by the token as it was added, with its flags.
        by_text = {token.content: token for token in added.values()}
        names = self.names(made_up)
        for key in STANDARD:
            if key in names:
                names[key] = by_text.get(text_of(names[key]), names[key])
        return SpecialTokens(names, extra, added)

    def add_old_spellings(self) -> None:
        """What special_tokens_map.json says overrides the rest, but for lists of extra tokens."""
        for key, value in self.folder.json_if_any(SPECIAL_TOKENS).items():
            before = self.given.get(key)
            if key == _EXTRA and isinstance(value, list) and isinstance(before, list):
                value = [*before, *(each for each in value if each not in before)]
            self.given[key], self.where[key] = value, SPECIAL_TOKENS

    def names(self, made_up: dict[str, Any]) -> dict[str, Token]:
        found = {key: self.given.get(key, self.defaults.get(key)) for key in STANDARD}
        found |= {
            key: value
            for key, value in self.given.items()
            if key.endswith("_token") and key not in STANDARD and isinstance(value, (str, dict))
        }
        return {
            key: self.token_or_text(self.where.get(key, TOKENIZER_CONFIG), key, value)
            for key, value in (found | made_up).items()
            if value is not None
        }

    def extra(self) -> list[Token]:
        value, file = self.given.get(_EXTRA), self.where.get(_EXTRA, TOKENIZER_CONFIG)
        if value is not None and not isinstance(value, list):
            self.folder.fail(file, f"{_EXTRA} is a {type(value).__name__}, not a list or object")
        return [
            self.token_or_text(file, f"{_EXTRA}[{index}]", each)
            for index, each in enumerate(value or [])
        ]

    def listed(self, decoder: object) -> dict[int, AddedToken]:
        found = {}
        for key, value in self.mapping(TOKENIZER_CONFIG, "added_tokens_decoder", decoder).items():
            name = f"added_tokens_decoder[{key!r}]"
            if not key.isdecimal():
                self.folder.fail(TOKENIZER_CONFIG, f"{name} is not a token id")
            found[int(key)] = self.token(TOKENIZER_CONFIG, name, value)
        return found

    def unlisted(self) -> dict[int, AddedToken]:
        """Those of added_tokens.json, and over them those of tokenizer.json."""
        found = {}
        if self.folder.has(ADDED_TOKENS):
            extra = self.given.get(_EXTRA)
            named = [self.given.get(key) for key in STANDARD]
            named += extra if isinstance(extra, list) else []
            special = [_content(each) for each in named]
            for text, token_id in self.folder.json(ADDED_TOKENS).items():
                self.check(ADDED_TOKENS, repr(text), text)
                is_special = text in special
                token = AddedToken(text, normalized=not is_special, special=is_special)
                found[self.token_id(ADDED_TOKENS, repr(text), token_id)] = token
        values = self.tokenizer.get("added_tokens") or []
        if not isinstance(values, list):
            self.folder.fail(TOKENIZER, "added_tokens is not a list")
        for index, value in enumerate(values):
            name = f"added_tokens[{index}]"
            flags = dict(self.mapping(TOKENIZER, name, value))
            token_id = self.token_id(TOKENIZER, name, flags.pop("id", None))
            found[token_id] = self.token(TOKENIZER, name, flags)
        return found

    # ── Values ──────────────────────────────────────────────────────────────────────────────────

    def mapping(self, file: str, key: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.folder.fail(file, f"{key} is a {type(value).__name__}, not an object")
        return value

    def token_id(self, file: str, key: str, value: object) -> int:
        if type(value) is not int or value < 0:
            self.folder.fail(file, f"{key} has the id {value!r}")
        return value

    def token_or_text(self, file: str, key: str, value: object) -> Token:
        if isinstance(value, str):
            self.check(file, key, value)
            return value
        if isinstance(value, dict) and file == SPECIAL_TOKENS:
            value = value | {"special": True}
        return self.token(file, key, value)

    def token(self, file: str, key: str, value: object) -> AddedToken:
        flags = dict(self.mapping(file, key, value))
        flags.pop("__type", None)
        content = flags.pop("content", None)
        if not isinstance(content, str):
            self.folder.fail(file, f"{key} has no content")
        for name, flag in flags.items():
            if name not in _FLAGS or type(flag) is not bool:
                self.folder.fail(file, f"{key}.{name} is {flag!r}: no flag of an added token")
        self.check(file, key, content)
        return AddedToken(content, **flags)

    def check(self, file: str, key: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.folder.fail(file, f"{key} {text!r} has a lone surrogate")


def _content(value: object) -> object:
    return value.get("content") if isinstance(value, dict) else value
