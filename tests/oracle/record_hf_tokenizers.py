"""Records what transformers' AutoTokenizer makes of small tokenizers of every kind.

Run by hand, in an environment with transformers:

    python tests/oracle/record_hf_tokenizers.py [NAME ...]

Each is trained on the texts here to a few hundred tokens, in the layout of the family it is called
after, and goes to tokenizers/NAME with cases.json: strings, their ids with special tokens, and what
the ids decode to. See README.md here.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from strings import generate  # noqa: E402

CASES = 260
SEED = 20260202
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((HERE / "texts").glob("*.txt"))]


def byte_level(steps: list[pre.PreTokenizer], merges: int, first: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=256 + len(first) + merges,
        special_tokens=[],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def split(regex: str) -> list[pre.PreTokenizer]:
    cut = pre.Split(Regex(regex), behavior="isolated")
    return [cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)]


def sentencepiece(control: list[str], merges: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary as SentencePiece numbers one: control tokens, bytes, then pieces."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre.Split(Regex("▁"), behavior="merged_with_next")
    trainer = BpeTrainer(vocab_size=merges + 160, limit_alphabet=160, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    pairs = [tuple(pair) for pair in model["merges"]]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, pairs


def special(*texts: str, **how: bool) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, **how) for text in texts]


def with_bos(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(split(LLAMA3), 300, [])
    values = json.loads(tokenizer.to_str())
    values["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.add_special_tokens(
        special("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>")
    )
    with_bos(tokenizer, "<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), tokenizer.post_processor]
    )
    template = (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    )
    return tokenizer, {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def llama2() -> tuple[Tokenizer, dict[str, Any]]:
    """As the files of Llama 2 are: the space in front is a normalizer's."""
    vocab, merges = sentencepiece(["<unk>", "<s>", "</s>"], 300)
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(special("<unk>", "<s>", "</s>"))
    with_bos(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama2_metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    """As newer files are (Mistral, Phi-3's added tokens): the space in front is a Metaspace's."""
    tokenizer, config = llama2()
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(special("<|user|>", "<|end|>", rstrip=True))
    return tokenizer, config | {
        "chat_template": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endfor %}{{ pad_token }}",
        "pad_token": "</s>",
    }


def qwen2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(split(QWEN2), 300, [])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer, {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }


def gemma() -> tuple[Tokenizer, dict[str, Any]]:
    vocab, merges = sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"], 300)
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(special("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"))
    tokenizer.add_special_tokens(special("<end_of_turn>"))
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("\n\n", "▁▁")])
    with_bos(tokenizer, "<bos>")
    return tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    """SmolLM, Granite, OLMo 2: GPT-2's own cutting, here with every digit apart."""
    steps = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    tokenizer = byte_level(steps, 300, [])
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return tokenizer, {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": [{"name": "default", "template": CHATML}, {"name": "x", "template": ""}],
    }


def cohere() -> tuple[Tokenizer, dict[str, Any]]:
    """A class that makes its own pipeline, whatever the file says."""
    tokenizer = byte_level([pre.ByteLevel(add_prefix_space=False)], 300, [])
    names = ("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>")
    tokenizer.add_special_tokens(special(*names, "<|END_OF_TURN_TOKEN|>"))
    with_bos(tokenizer, "<BOS_TOKEN>")
    return tokenizer, {
        "tokenizer_class": "CohereTokenizerFast",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "chat_template": CHATML,
    }


# Each kind, and whether its template lies in a file of its own.
KINDS = {
    "llama3": (llama3, True),
    "llama2": (llama2, False),
    "llama2-metaspace": (llama2_metaspace, False),
    "qwen2": (qwen2, False),
    "gemma": (gemma, False),
    "gpt2": (gpt2, False),
    "cohere": (cohere, False),
}
MESSAGES = [
    {"role": "user", "content": " What is 2 + 2? \n"},
    {"role": "assistant", "content": "4"},
]


def record(name: str, tokenizer: Tokenizer, config: dict[str, Any], own_file: bool) -> None:
    folder = HERE / "tokenizers" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    if own_file:
        (folder / "chat_template.jinja").write_text(config.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*generate(CASES, SEED)]
    # Special tokens inside of a text, beside spaces, and one after the other.
    added = [str(token) for token in auto.added_tokens_decoder.values()]
    texts += [f"a {token} b{token}{token}c \n{token}" for token in added]
    lines = []
    for text in texts:
        ids = auto(text)["input_ids"]
        case = {"text": text, "ids": ids}
        for key, skip in (("decoded", False), ("skipped", True)):
            case[key] = auto.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
        lines.append(json.dumps(case, separators=(",", ":")))
    chat = (
        auto.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        if auto.chat_template
        else None
    )
    head = json.dumps({"messages": MESSAGES, "text": chat, "size": len(auto)})
    body = ",\n".join(lines)
    (folder / "cases.json").write_text(f'{{"chat":{head},\n"cases":[\n{body}\n]}}\n')
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {type(auto).__name__}, {len(auto)} tokens, {len(lines)} cases, {size:,} bytes")


def main() -> None:
    for name in sys.argv[1:] or KINDS:
        build, own_file = KINDS[name]
        record(name, *build(), own_file)


if __name__ == "__main__":
    main()
