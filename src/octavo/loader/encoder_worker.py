"""The process in which a tokenizer runs that may take any time and memory; started by
`octavo.loader.tokenizer`.

The hello is {"tokenizer", "control", "limits"}, the first as tokenizer.json has it. A request is
{"text"}, or {"text", "origin", "given"} of a rendered chat, and answered with {"ids"} or {"error"}.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from octavo.loader import apart_worker
from octavo.loader.encoder import Encoder, guarded

Json = dict[str, Any]


def main() -> None:
    # The library's last words on standard error are about its insides: the parent says enough.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    apart_worker.serve(prepare, "tokenizer")


def prepare(hello: Json) -> Callable[[Json], Json]:
    backend = guarded(Tokenizer.from_str, hello["tokenizer"])
    encoder = Encoder(backend, hello["control"])

    def answer(request: Json) -> Json:
        try:
            if "origin" not in request:
                return {"ids": encoder.ids(request["text"])}
            origin = request["origin"].encode("latin-1")
            return {"ids": encoder.chat_ids(request["text"], origin, request["given"])}
        except ValueError as error:
            return {"error": str(error)}

    return answer
